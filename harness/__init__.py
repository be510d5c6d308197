"""Instruments, each useful alone. Of this repository they import nothing but each other.

They know no technique, but for this: of the flags that checkpoint.py writes into a checkpoint some
belong to one script alone. Import this package before torch, as every script does ahead of
common.py: torch warns where NumPy is missing, and nothing here needs NumPy.
"""
import warnings

__all__ = [
    "checkpoint", "clock", "compare", "guard", "ledger", "profiler", "report", "timeline", "usage",
]
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
