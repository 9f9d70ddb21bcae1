"""What must be true of a whole file system, and what mends it. Pure."""
