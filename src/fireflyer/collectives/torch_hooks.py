"""A communication hook for stock `DistributedDataParallel`, over whichever process group it was made.

>>> state = HookState(communicator_of(), compression=Compression("bf16"))
>>> model.register_comm_hook(state, hfreduce_hook)

DDP calls the hook once for each bucket of gradients, in the same order on all ranks, and gets a future of the bucket's
mean. The parameter must be called `bucket`, and its annotation is compared with the class itself: therefore this module
does not postpone the evaluation of annotations.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but the stub does not say so

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.compression import CompressedMean, Compression
from fireflyer.collectives.torch.completer import Completer
from fireflyer.collectives.torch.methods import not_traced
from fireflyer.collectives.torch.work import GroupWork, InFlightOperation, Promise
from fireflyer.collectives.torch_devices import DeviceCommunicator
from fireflyer.collectives.work import when_there_is_room

__all__ = ["HookState", "hfreduce_hook"]

LAG: Final = 2
"""The second step of a compressed mean starts when the first steps of so many later buckets have been started."""


@not_traced
class HookState:
    """One for each model. The communicator stays the caller's: close it after the last step, then `close` this.

    Buckets that are not float32 are summed as they are, whatever `compression` is.
    """

    def __init__(self, communicator: Communicator, *, compression: Compression | None = None) -> None:
        self.communicator = communicator
        self._comm = DeviceCommunicator.of(communicator)
        self.compression = compression
        self._completer = Completer(f"hook futures of rank {communicator.rank}")
        self._waiting: list[tuple[CompressedMean, torch.Tensor, Promise]] = []

    def close(self) -> None:
        """Ends the thread that completes futures."""
        self._completer.stop()

    def mean(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._waiting.clear()  # of a pass that broke off
        flat = bucket.buffer()
        if self.compression is not None and flat.dtype == torch.float32:
            future = self._compressed(bucket, flat, self.compression)
        else:
            future = self._plain(flat)
        if bucket.is_last():
            self._advance(0)
        return future

    def _plain(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        start = partial(self._comm.allreduce, flat, op="mean", async_op=True)
        return self._started(lambda: [when_there_is_room(start)], flat).get_future()

    def _compressed(
        self, bucket: GradBucket, flat: torch.Tensor, compression: Compression
    ) -> torch.futures.Future[torch.Tensor]:
        if flat.device.type != "cpu":
            raise UsageError(f"the bucket is on {flat.device}; compression works in CPU memory, pass compression=None")
        # DDP makes other buckets after the first step, so the number of elements is part of the name.
        key = f"{bucket.index()}-{flat.numel()}"
        promise = Promise()
        try:
            mean = compression.start(self.communicator, key, flat.numpy())
        except FireflyerError as error:
            promise.keep(error, flat)
        else:
            self._waiting.append((mean, flat, promise))
        self._advance(LAG)
        return promise.future

    def _advance(self, lag: int) -> None:
        while len(self._waiting) > lag:
            mean, flat, promise = self._waiting.pop(0)
            work = self._started(partial(_second_step, mean), flat, mean.finish)
            self._completer.add(work, partial(_keep, promise, work, flat))

    def _started(
        self, start: Callable[[], list[InFlightOperation]], flat: torch.Tensor, finish: Callable[[], None] | None = None
    ) -> GroupWork:
        try:
            return GroupWork(self._completer, start(), flat, finish=finish)
        except FireflyerError as error:
            return GroupWork(self._completer, [], flat, error=error)


def _second_step(mean: CompressedMean) -> list[InFlightOperation]:
    return list(mean.advance())


def _keep(promise: Promise, work: GroupWork, flat: torch.Tensor) -> None:
    promise.keep(work.error, flat)


def hfreduce_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the bucket over all ranks; for `DistributedDataParallel.register_comm_hook`."""
    return state.mean(bucket)
