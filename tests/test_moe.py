import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import moe
from common import MLP, GPTConfig
from conftest import SMALL, dry_run_agrees, proves, run, script, textbook


@pytest.mark.parametrize("world, flags", [
    (1, ["--top-k", "1"]), (1, ["--capacity", "0.8", "--balance", "bias"]), (2, []), (2, ["--impl", "torch"]),
    (2, ["--top-k", "1", "--capacity", "1.1", "--shared"]), (2, ["--balance", "bias", "--shared"]),
    (2, ["--balance", "none", "--capacity", "0.5"]), (4, ["--ep", "2", "--shared"]), (4, ["--capacity", "0.7", "--clip", "0"]),
    (4, ["--ep", "2", "--capacity", "0.6", "--balance", "bias", "--top-k", "1"]), (4, ["--ep", "1", "--balance", "none"]),
    (4, ["--ep", "2", "--impl", "torch", "--top-k", "3", "--balance", "bias"]), (3, ["--experts", "9", "--batch", "6", "--vocab", "257"])])
def test_equals_plain(world, flags):
    report = proves("moe", world, *flags)
    textbook(report)
    assert (report["dropped"] > 0) == ("--capacity" in flags)
