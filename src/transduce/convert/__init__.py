"""The door to other programs: models of theirs in, models of ours out."""
