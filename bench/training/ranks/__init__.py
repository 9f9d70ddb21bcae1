"""What ranks of a benchmark of training run."""
