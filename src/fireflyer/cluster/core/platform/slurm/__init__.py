"""Slurm as the engine of the platform: it places, and agents come up in its jobs."""
