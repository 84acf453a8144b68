"""The decoding library of transduce, compiled. transduce finds it here; there is nothing to call."""
