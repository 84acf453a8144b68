"""Tasks: what a model is trained for, from its text to its report. `table.py` names them."""
