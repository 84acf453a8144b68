"""Texts with tags, or with parts that must stay: parsing, and transfer to the translation."""
