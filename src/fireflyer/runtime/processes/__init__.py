"""Processes that cannot be left behind: guards, parent-death signals, standard streams."""
