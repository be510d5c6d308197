"""Instruments, each useful alone. Of this repository they import nothing but each other.

They run with any technique. What a technique has of its own, such as a schedule or experts, they
know only as far as they have to draw it or to say it in words. Import this package before torch, as
every script does ahead of common.py: torch warns where NumPy is missing, and nothing here needs it.
"""
import warnings

__all__ = [
    "checkpoint", "clock", "compare", "guard", "ledger", "profiler", "report", "timeline", "usage",
]
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
