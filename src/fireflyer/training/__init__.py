"""Training in parallel on PyTorch: data parallelism on our own collectives. Imports torch."""

from fireflyer.training.communication import Communicator, Work
from fireflyer.training.ddp import DistributedDataParallel
from fireflyer.training.reducer import ReducerStats

__all__ = ["Communicator", "DistributedDataParallel", "ReducerStats", "Work"]
