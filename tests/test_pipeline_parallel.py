import pytest
from conftest import proves


@pytest.mark.parametrize("micro", [1, 4, 8])
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "pipedream"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_one_process(world, schedule, micro):
    layers = 9 if schedule == "interleaved" and world == 4 else 5
    if schedule == "interleaved" and micro % world:
        micro = 4
    proves("pipeline_parallel", world, "--layers", str(layers), "--schedule", schedule, "--micro", str(micro))
