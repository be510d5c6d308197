"""Instruments, each useful alone: they know no technique, and import nothing from elsewhere."""
