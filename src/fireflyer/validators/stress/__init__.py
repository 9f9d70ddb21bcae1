"""Validators: they load the parts of a node for minutes, check what comes out, and measure how fast."""
