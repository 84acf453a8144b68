"""What `transduce doctor` looks at: a sample of the data, the memory, the speed, the disk."""
