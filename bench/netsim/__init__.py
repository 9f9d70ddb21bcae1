"""The flow simulator: a cluster of 10,000 GPUs, and flows at random beside SimGrid."""
