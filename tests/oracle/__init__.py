"""Slow, simple reference implementations in float64 NumPy, and the mapping of weight names."""
