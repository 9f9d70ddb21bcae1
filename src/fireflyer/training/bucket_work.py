"""The mean of one bucket over all ranks while it is under way: plain, compressed, or made by a communication hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from fireflyer.collectives.compression import CompressedMean, Compression
from fireflyer.training.communication import Communicator, Work

__all__ = ["BucketWork", "MeanInFlight", "StartedMeans", "start_mean"]

LAG: Final = 2


class MeanInFlight(Protocol):
    """After `wait` the bucket holds the mean."""

    def advance(self) -> None:
        """Starts the second step of a mean that has two. Its place among the operations is the same on all ranks."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class BucketWork:
    """Works of which each must be waited for; then, where it is compressed, the mean is unpacked."""

    def __init__(self, works: Sequence[Work], compressed: CompressedMean | None = None) -> None:
        self._works = list(works)
        self._compressed = compressed
        self._advanced = compressed is None

    def advance(self) -> None:
        if self._compressed is not None and not self._advanced:
            self._advanced = True
            self._works.extend(self._compressed.advance())

    def done(self) -> bool:
        return self._advanced and all(work.done() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if self._compressed is not None:
            if self._advanced:
                self._compressed.finish()
            self._compressed = None


class StartedMeans:
    """The means of one pass in the order of their start: the second step of each follows `LAG` more first steps.

    So all ranks start all steps in one order, those that only take part for others (see `uneven_inputs`) too.
    """

    def __init__(self) -> None:
        self._means: list[MeanInFlight] = []

    def __len__(self) -> int:
        return len(self._means)

    def add(self, mean: MeanInFlight) -> None:
        self._means.append(mean)
        if len(self._means) > LAG:
            self._means[-1 - LAG].advance()

    def end(self) -> None:
        """No more first steps come."""
        for mean in self._means[-LAG:]:
            mean.advance()


def start_mean(
    comm: Communicator,
    key: str,
    flat: torch.Tensor,
    gradients: torch.Tensor,
    compression: Compression | None,
    ranks: int | None = None,
) -> BucketWork:
    """Starts the mean of `flat`, of which `gradients` is the beginning that may be compressed: float32 on the CPU.

    `ranks`: divide by so many, not by the number of all ranks. It may differ between ranks whose `flat` is zero, but
    must be None on all or on none.
    """
    if compression is None or flat.dtype != torch.float32 or flat.device.type != "cpu":
        if ranks is not None:
            flat.div_(ranks)  # before the sum, which might not fit into a small float
        return BucketWork([comm.allreduce(flat, op="mean" if ranks is None else "sum", async_op=True)])
    if ranks is not None:
        gradients.mul_(comm.world_size / ranks)
    rest = flat[gradients.numel() :]
    works = [comm.allreduce(rest, op="mean", async_op=True)] if rest.numel() > 0 else []
    return BucketWork(works, compression.start(comm, key, gradients.numpy()))
