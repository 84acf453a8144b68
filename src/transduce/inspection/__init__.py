"""Inspection of a model's computation for one sentence, drawn for the terminal, SVG, PNG and HTML."""
