"""Texts with tags or preserved parts: parsing, and transfer to the translation."""
