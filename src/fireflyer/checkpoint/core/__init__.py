"""The decisions of checkpointing: layout, shares, order of steps, what to keep. Pure."""
