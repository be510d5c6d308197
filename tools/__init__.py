"""Programs beside the nine techniques; nothing imports them but other tools and the tests."""

__all__ = [
    "bandwidth", "curves", "draw", "estimate", "evaluate", "everything", "gpu", "launch", "papers",
    "plan", "sample", "scale", "soak", "sweep", "usable", "weights",
]
