"""What becomes of a node whose checks report faults: confirmed, drained, repaired, tested, returned. Pure."""
