"""Instruments, each useful alone, which import nothing from elsewhere.

They know no technique, but for the flags that checkpoint.py writes down: some are one script's.
Imported before torch, this package keeps torch from a warning that NumPy, which it can do without,
is missing.
"""
import warnings

__all__ = [
    "checkpoint", "clock", "compare", "guard", "ledger", "profiler", "report", "timeline", "usage",
]
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
