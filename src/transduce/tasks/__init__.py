"""Tasks: the kinds of training, each from the text to the report. `resolve.py` has the table of tasks."""
