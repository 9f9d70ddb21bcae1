"""What Slurm says, what it is asked, and what follows for a job: pure."""
