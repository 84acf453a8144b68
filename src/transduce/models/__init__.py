"""Models: each file says only what is its own; the parts stand in `transduce.nn`."""
