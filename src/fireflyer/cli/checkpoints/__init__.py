"""`ff ckpt`: checkpoints that are there."""
