"""Training of several recipes under the same conditions, and comparison of their results (`compare`)."""
