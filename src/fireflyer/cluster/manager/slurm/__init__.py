"""The commands of Slurm, and the loop that compares what Slurm says with what the rows say."""
