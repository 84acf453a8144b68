"""The HTTP protocols of the service. Each module turns requests into calls of `Service`, and responds."""
