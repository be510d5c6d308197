"""What a run needs besides the technique. It stands on common.py and torch, and knows no technique.
"""
