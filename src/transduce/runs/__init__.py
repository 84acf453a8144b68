"""Run folders: the model, its training states, checksums, atomic writes."""
