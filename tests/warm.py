"""Imported by the server that ranks fork from: they inherit what it has imported.

The server would find modules in the current folder alone, such as tests.warm: this file and
conftest.py tell it where the others are. It must run no backward: after one, torch with CUDA
refuses those of a fork.
"""
import contextlib
import gc
import importlib
import pkgutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
for name in (
    "conftest", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining", "torch.distributed.checkpoint", "ddp", "fsdp", "hybrid_3d",
    "amp_accum_ckpt", "torch.testing._internal.distributed.fake_pg", "pytest", "others",
    # which techniques import when they run: to compile it takes half of a small run's time
    *[f"harness.{module.name}" for module in pkgutil.iter_modules([HERE.parent / "harness"])],
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()  # no garbage collection looks through these again
