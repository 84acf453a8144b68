"""Training: loss, schedule, optimisers, one update, averaging, validation, and the loop around them."""
