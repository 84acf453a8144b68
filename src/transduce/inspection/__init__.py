"""Attention weights: captured from a model, and drawn for the terminal, SVG, PNG and HTML."""
