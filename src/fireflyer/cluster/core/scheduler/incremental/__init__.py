"""What the scheduler's machine keeps between decisions: the queue, the runs, and whom a pass need not ask."""
