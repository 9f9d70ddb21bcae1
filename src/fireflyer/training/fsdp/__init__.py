"""Fully sharded data parallelism (ZeRO 1, 2 and 3) on PyTorch's FSDP2, with our collectives and optimizer."""

from fireflyer.training.fsdp.optimizer import StepCost, StepInBackward, StepOutcome
from fireflyer.training.fsdp.sharding import ReplicaMean, ShardedModel, shard

__all__ = ["ReplicaMean", "ShardedModel", "StepCost", "StepInBackward", "StepOutcome", "shard"]
