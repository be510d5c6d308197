"""Instruments, each useful alone: they know no technique, and import nothing from elsewhere."""

__all__ = [
    "checkpoint", "clock", "compare", "guard", "ledger", "profiler", "report", "timeline", "usage",
]
