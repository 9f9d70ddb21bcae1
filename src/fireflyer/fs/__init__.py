"""3FS: a strongly consistent, replicated chunk store, and the file system on it."""
