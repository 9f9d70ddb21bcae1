"""`ff sim`: what policies make of a trace."""
