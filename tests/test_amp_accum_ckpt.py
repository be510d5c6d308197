import pytest

from conftest import proves


@pytest.mark.parametrize("world, flags", [
    (1, ["--accum", "3", "--ckpt", "full"]), (1, ["--accum", "4", "--ckpt", "selective"]),
    (2, ["--accum", "1", "--ckpt", "full"]), (2, ["--accum", "3", "--ckpt", "selective"])])
def test_equals_one_process(world, flags):
    proves("amp_accum_ckpt", world, *flags)
