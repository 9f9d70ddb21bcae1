"""`ff train`: plans, schedules and runs of parallel training."""
