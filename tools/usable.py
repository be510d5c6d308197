"""Exit code 0 if this Python has what the project needs."""
import sys

import pytest  # noqa: F401
import torch

major, minor = torch.__version__.split(".")[:2]
is_too_old = (int(major), int(minor)) < (2, 11)
sys.exit(int(is_too_old))
