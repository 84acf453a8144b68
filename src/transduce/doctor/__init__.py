"""Checks before a training: data, memory, speed, time and disk space."""
