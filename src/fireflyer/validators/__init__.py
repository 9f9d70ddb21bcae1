"""Checks of a node: is something wrong with its memory, its disks, its links? `python -m fireflyer.validators`."""
