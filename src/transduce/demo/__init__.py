"""The built-in English-German corpus."""
