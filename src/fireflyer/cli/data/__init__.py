"""`ff data`: record shards."""
