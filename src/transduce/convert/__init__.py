"""Import of models from other programs, and export to them."""
