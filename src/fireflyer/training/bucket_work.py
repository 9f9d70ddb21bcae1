"""The mean of one bucket over all ranks while it is under way: plain, or compressed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fireflyer.collectives.compression import CompressedMean, Compression
from fireflyer.training.communication import Communicator, Work

__all__ = ["BucketWork", "start_mean"]


class BucketWork:
    """Works of which each must be waited for; then, where it is compressed, the mean is unpacked."""

    def __init__(self, works: Sequence[Work], compressed: CompressedMean | None = None) -> None:
        self._works = list(works)
        self._compressed = compressed
        self._advanced = compressed is None

    def advance(self) -> None:
        """Starts the second step of a compressed mean. Its place among the operations is the same on all ranks."""
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


def start_mean(
    comm: Communicator, key: str, flat: torch.Tensor, gradients: torch.Tensor, compression: Compression | None
) -> BucketWork:
    """Starts the mean of `flat`, of which `gradients` is the beginning that may be compressed: float32 on the CPU."""
    if compression is None or flat.dtype != torch.float32 or flat.device.type != "cpu":
        return BucketWork([comm.allreduce(flat, op="mean", async_op=True)])
    rest = flat[gradients.numel() :]
    works = [comm.allreduce(rest, op="mean", async_op=True)] if rest.numel() > 0 else []
    return BucketWork(works, compression.start(comm, key, gradients.numpy()))
