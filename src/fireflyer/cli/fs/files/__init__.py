"""`ff fs ls`, `cp`, `find` and the other commands on files."""
