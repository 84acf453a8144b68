"""Resumable bulk translation of files into a folder, on one machine or a Ray cluster."""
