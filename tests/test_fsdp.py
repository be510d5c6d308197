import pytest
from conftest import proves


@pytest.mark.parametrize("world, flags", [
    (1, []), (2, []), (4, []), (3, ["--batch", "7", "--vocab", "257"]), (2, ["--no-reshard"])])
def test_equals_one_process(world, flags):
    proves("fsdp", world, *flags)
