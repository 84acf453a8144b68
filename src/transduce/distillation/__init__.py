"""Sequence-level knowledge distillation: a student learns from the translations of its teachers."""
