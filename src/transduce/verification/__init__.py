"""Checks of a finished run or a recipe: that files are intact, and that a resume is exact."""
