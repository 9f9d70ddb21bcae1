"""Model and hardware co-design: what a model needs, plans of parallel training, pipeline schedules. Pure: no torch.

- `model`: parameters, FLOPs and KV cache of a model, from its dimensions.
- `parallel`: `ParallelPlan`, its checks, and its bytes and time per step.
- `schedule`: pipeline schedules as data, and the simulator that times them.
"""
