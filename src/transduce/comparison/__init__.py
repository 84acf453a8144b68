"""`compare`: trains several recipes under the same conditions and compares the results."""
