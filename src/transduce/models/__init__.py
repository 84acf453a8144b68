"""Models: one file per architecture, built from the layers in `transduce.nn`."""
