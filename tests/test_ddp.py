import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from conftest import dry_run_agrees, proves, run, script, textbook
from torch.nn.parallel import DistributedDataParallel

from ddp import BucketedDDP


@pytest.mark.parametrize("world, flags", [
    (1, []), (2, []), (4, []), (3, ["--batch", "7"]), (2, ["--bucket-mb", "0"]), (2, ["--bucket-mb", "0.01", "--vocab", "257"]),
    (2, ["--impl", "torch"]), (4, ["--impl", "torch"])])
def test_equals_one_process(world, flags):
    proves("ddp", world, *flags)
