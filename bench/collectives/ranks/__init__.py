"""What ranks of a benchmark run."""
