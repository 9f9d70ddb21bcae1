"""`ff fs`: the distributed file system."""
