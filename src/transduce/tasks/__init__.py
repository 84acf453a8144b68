"""Tasks: what a model is trained for, from its text to its report. `registry.py` names them."""
