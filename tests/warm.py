"""Imported by the server that ranks fork from: they inherit what it has imported.

The server would find modules in the current folder alone, such as tests.warm: this file tells it
where the others are. It must run no backward: after one, torch with CUDA refuses those of a fork.
"""
import contextlib
import gc
import importlib
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [str(ROOT / "tests"), str(ROOT), str(ROOT / "tools")]
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch  # noqa: E402

torch.set_num_threads(1)  # other threads would not be there in a process that is forked
IMPORTED = (
    "torch.distributed", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
    "torch.distributed.checkpoint", "torch.testing._internal.distributed.fake_pg", "pytest",
    "conftest", *(path.stem for path in ROOT.glob("*.py")),
)
for name in IMPORTED:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()  # no garbage collection looks through these again
