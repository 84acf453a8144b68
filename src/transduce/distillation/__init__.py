"""Sequence-level knowledge distillation: a student learns from the translations of a teacher."""
