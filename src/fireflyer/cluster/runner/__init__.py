"""The launcher of one run of the platform: started by the agent of the run's first node, as the account of the task."""
