"""The soak: random faults while tasks run, and a check that nothing was lost."""
