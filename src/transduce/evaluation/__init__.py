"""Scores with signatures, comparison of systems, the run's report and its model card."""
