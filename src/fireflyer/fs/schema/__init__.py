"""Structs of the file system that cross a boundary: ids, routing, and what the services say to each other."""
