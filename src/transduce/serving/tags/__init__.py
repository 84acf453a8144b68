"""Parse texts with tags or preserved parts, and put both into the translation."""
