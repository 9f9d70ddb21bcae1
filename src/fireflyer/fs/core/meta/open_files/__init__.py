"""Open files: their lengths, truncation, advisory locks, and the collection of what is unlinked. Pure."""
