"""The mean of a stage's gradients over data-parallel replicas of the pipeline, started when the stage is complete."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import nn

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB
from fireflyer.training.bucket_work import BucketWork, start_mean
from fireflyer.training.buckets import Bucket, plan_buckets
from fireflyer.training.communication import Communicator
from fireflyer.training.reducer import REDUCED_DTYPES

__all__ = ["GradientMeans"]

_BUCKET_BYTES = 25 * MIB


class GradientMeans:
    """Over the ranks of `comm`, which hold the same stages of different pipelines and run the same schedule: so all
    start the same sums in the same order. Gradients lie in the memory of the communicator."""

    def __init__(
        self,
        comm: Communicator,
        stages: Mapping[tuple[int, int], nn.Module],
        later: AbstractSet[int],
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        """`later`: ids of parameters whose gradients are complete at the end of a step only."""
        self._comm = comm
        seen = set(later)
        self._buckets: dict[tuple[int, int] | None, list[Bucket]] = {None: []}
        rest: dict[int, tuple[str, nn.Parameter]] = {}
        for key in sorted(stages):
            own: list[tuple[str, nn.Parameter]] = []
            for name, parameter in stages[key].named_parameters():
                full = f"stage {key[1]} direction {key[0]} {name}"
                if parameter.requires_grad and id(parameter) in later:
                    rest.setdefault(id(parameter), (full, parameter))
                elif parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    own.append((full, parameter))
            self._buckets[key] = self._make(own, bucket_bytes)
        self._buckets[None] = self._make(list(rest.values()), bucket_bytes)
        self._started: list[tuple[Bucket, BucketWork]] = []

    def start(self, direction: int, stage: int) -> None:
        """All gradients of the stage are there, but for those that come at the end."""
        self._start(self._buckets[direction, stage])

    def finish(self) -> None:
        """The others are there too. Returns when `grad` of all parameters holds the mean."""
        self._start(self._buckets[None])
        for bucket, work in self._started:
            work.wait()
            bucket.deliver()
        self._started.clear()

    def _start(self, buckets: list[Bucket]) -> None:
        with torch.no_grad():
            for bucket in buckets:
                for slot in range(len(bucket.parameters)):
                    bucket.collect(slot)
                name = f"{bucket.names[0]}..{bucket.names[-1]}"
                work = start_mean(self._comm, name, bucket.summed, bucket.summed_gradients, None)
                self._started.append((bucket, work))

    def _make(self, parameters: list[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[Bucket]:
        for name, parameter in parameters:
            if parameter.dtype not in REDUCED_DTYPES:
                raise UsageError(f"gradients of {name} are {parameter.dtype}, which cannot be summed; freeze it")
        sizes = [(str(one.dtype), one.numel() * one.element_size()) for _, one in parameters]
        return [
            Bucket([parameters[i][0] for i in members], [parameters[i][1] for i in members], comm=self._comm)
            for members in plan_buckets(sizes, bucket_bytes)
        ]
