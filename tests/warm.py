"""Imported by the server that ranks fork from: they inherit what it has imported.

The server would find modules in the current folder alone, such as tests.warm: this file and
conftest.py tell it where the others are. It must run no backward: after one, torch with CUDA
refuses those of a fork.
"""
import contextlib
import gc
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
for name in (
    "conftest", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "torch.distributed.checkpoint", "ddp", "fsdp", "hybrid_3d",
    "torch.testing._internal.distributed.fake_pg", "pytest",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()  # no garbage collection looks through these again
