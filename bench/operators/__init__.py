"""What operators wait for: reports of failures over the tables of a large cluster."""
