"""Reliability of a cluster: mathematics of failures, published tables, characterisation, lemon nodes, attribution."""
