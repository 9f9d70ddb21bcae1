"""From evidence to a verdict. Pure."""
