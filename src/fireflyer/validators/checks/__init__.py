"""Captures what the health checks of a node read, and remembers their counters; `core.checks` judges."""
