"""What validators find on a node, compared with its peers. Pure."""
