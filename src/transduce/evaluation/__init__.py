"""Scores with signatures, comparison of systems, the report and the model card."""
