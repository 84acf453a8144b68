"""Search, sampling and scoring of token ids, and the classes that use the models of run folders on text."""
