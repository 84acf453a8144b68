"""Slow, obvious twins in float64 NumPy, and the names that lead from a model's weights to theirs."""
