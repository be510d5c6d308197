"""Instruments, each useful alone. Of this repository they import nothing but each other.

They know no technique; only checkpoint.py writes down flags of which some are one script's. Import
this package before torch, which otherwise warns where NumPy is missing. Nothing here needs NumPy.
"""
import warnings

__all__ = [
    "checkpoint", "clock", "compare", "guard", "ledger", "profiler", "report", "timeline", "usage",
]
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
