"""From a model and source ids to target ids (search, sampling, scoring), and from text to text (pipeline)."""
