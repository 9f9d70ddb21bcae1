"""Saving and loading checkpoints: ours, what torch and safetensors offer, and a plain program with O_DIRECT."""
