"""Attention patterns: which keys a query may attend to, by their positions, and how sparse patterns are computed.

To add one: a class in `pattern.py` with a layout from `layouts.py`, and a row of PATTERNS there.
"""
