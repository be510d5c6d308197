"""Instruments, each useful alone, which import nothing from elsewhere.

They know no technique, but for the flags that checkpoint.py writes down: some are one script's.
"""

__all__ = [
    "checkpoint", "clock", "compare", "guard", "ledger", "profiler", "report", "timeline", "usage",
]
