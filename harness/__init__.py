"""Instruments, each useful alone. They know no technique, and import nothing from outside this folder."""
