"""`ff collectives`: flight recorders and plans."""
