"""Plans of parallel training: degrees, stages, memory and traffic per rank, time per step, search."""
