"""Run folders: the model, its checkpoints, checksums and atomic writes."""
