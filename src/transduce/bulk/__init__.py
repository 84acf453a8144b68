"""Bulk translation: file by file into a folder, resumable, on one machine or a Ray cluster."""
