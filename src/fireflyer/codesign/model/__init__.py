"""Parameters, FLOPs, memory and KV cache of a model, computed from its dimensions."""
