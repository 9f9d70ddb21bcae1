"""The manager process."""
