import pytest

from conftest import proves


@pytest.mark.parametrize("world, flags", [
    (1, ["--stage", "3"]), (2, ["--stage", "0", "--accum", "3"]), (2, ["--stage", "1"]), (4, ["--stage", "2", "--accum", "2"]),
    (3, ["--stage", "3", "--accum", "3", "--batch", "10"]), (2, ["--stage", "3", "--offload", "param"])])
def test_equals_one_process(world, flags):
    proves("zero", world, *flags)
