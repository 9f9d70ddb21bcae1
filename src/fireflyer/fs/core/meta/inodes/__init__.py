"""One inode and the way to it: path walk, permissions, attributes, layout. Pure."""
