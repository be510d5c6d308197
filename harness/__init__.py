"""What a run needs besides the technique. It stands on common.py and torch, and knows no technique.

What only one script means, such as the name of a parameter or a flag, that script hands in.
"""
