"""Parts of a Transformer, each usable alone: plain keyword arguments, no settings."""
