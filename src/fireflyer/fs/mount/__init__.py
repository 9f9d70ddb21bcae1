"""Files for programs that know nothing of us: a mount through FUSE."""
