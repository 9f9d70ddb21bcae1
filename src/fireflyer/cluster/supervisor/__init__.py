"""One process per node: starts ranks, forwards what they print, reports how they end."""
