"""The guard of one rank: takes digests, exchanges them with the other replicas, raises what the comparison finds.

Every look costs one pass over the state and one message of 32 bytes to each replica. Only where these differ are
digests of tensors exchanged, 8 bytes for each, to say which differ and on which rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from fireflyer.base.errors import PeerFailed, UsageError
from fireflyer.runtime.reporter import Reporter
from fireflyer.training.guard.compare import CheckTime, CorruptionFound, GuardVerdict, compare
from fireflyer.training.guard.digest import combine, digest
from fireflyer.training.guard.state import Item, describe, items_of, replica_group

__all__ = ["Guard", "GuardCost", "check_same_look"]

_POINTS: Final[tuple[CheckTime, ...]] = ("before_commit", "after_commit", "before_save")
_ABSENT: Final = -1
"""Stands for the digest of a gradient that was not computed."""


class GuardCost(msgspec.Struct, frozen=True, kw_only=True):
    """Time and bytes that the guard took on this rank since it was made."""

    looks: int = 0
    digested_bytes: int = 0
    digest_ns: int = 0
    exchange_ns: int = 0
    """Includes the wait for ranks that come later."""

    def __str__(self) -> str:
        rate = self.digested_bytes / max(1, self.digest_ns)
        each_ms = (self.digest_ns + self.exchange_ns) / max(1, self.looks) / 1e6
        return (
            f"guard: {self.looks} looks, {each_ms:.2f} ms each; {self.digested_bytes / 1e6:.1f} MB digested at "
            f"{rate:.2f} GB/s; exchange {self.exchange_ns / 1e6:.1f} ms"
        )


class Guard:
    """Compares the state of `model` and `optimizer` with that of the other replicas, every `every` steps, twice.

    All ranks make one, and call `before_commit` between backward and the optimizer's step and `after_commit` after it,
    with the same numbers of steps; and `before_save` before each checkpoint: from one that has a flipped bit all
    replicas would go on alike. `group` are the ranks that hold the same tensors; without it they follow from the
    model (`replica_group`). With `on_corruption="return"` the verdict is returned and `CorruptionFound` is not raised.
    `reporter` tells the launcher, as evidence against the nodes of the ranks that a verdict names.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 100,
        group: dist.ProcessGroup | None = None,
        on_corruption: Literal["raise", "return"] = "raise",
        reporter: Reporter | None = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"every {every} must be at least 1")
        if on_corruption not in ("raise", "return"):
            raise UsageError(f"on_corruption {on_corruption!r} must be 'raise' or 'return'")
        self._model, self._optimizer = model, optimizer
        self._every, self._raises = every, on_corruption == "raise"
        self._group = replica_group(model, group)
        self._own_rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._reporter = reporter
        self._last_step: int | None = None
        self._agreed_step: int | None = None
        self._cost = GuardCost()

    @property
    def cost(self) -> GuardCost:
        return self._cost

    def before_commit(self, step: int) -> GuardVerdict | None:
        """Looks at parameters, optimizer state and gradients; None at a step without a look. Collective.

        Raises `CorruptionFound`, on all ranks; `PeerFailed` if a rank did not answer within the timeout of the group;
        `UsageError` if ranks look at different things, or the step is before the last one without `start_anew`.
        """
        return self._look(step, "before_commit")

    def after_commit(self, step: int) -> GuardVerdict | None:
        """Looks at parameters and optimizer state, as `before_commit`."""
        return self._look(step, "after_commit")

    def before_save(self, step: int) -> GuardVerdict:
        """Looks at parameters and optimizer state of a checkpoint that is about to be saved, whatever `every` is.
        Raises as `before_commit`. For `TrainingLoop(..., before_save=guard.before_save)`."""
        self._goes_on_at(step)
        return self._verdict(step, "before_save")

    def start_anew(self) -> None:
        """Begin again after a rewind: steps may begin lower, and agreement of before says nothing of the state now. All
        ranks."""
        self._last_step = self._agreed_step = None

    def _look(self, step: int, point: CheckTime) -> GuardVerdict | None:
        self._goes_on_at(step)
        return None if step % self._every else self._verdict(step, point)

    def _goes_on_at(self, step: int) -> None:
        if self._last_step is not None and step < self._last_step:
            raise UsageError(
                f"step {step} is before step {self._last_step}; call start_anew() of the guard after a rewind"
            )
        self._last_step = step

    def _verdict(self, step: int, point: CheckTime) -> GuardVerdict:
        if self._group is None or self._group.size() < 2:
            return compare(step, point, (), {self._own_rank: ()}, agreed_step=self._agreed_step)
        items = list(items_of(self._model, self._optimizer, gradients=point == "before_commit"))
        digests = self._digests(items)
        began_ns = time.perf_counter_ns()
        verdict = self._compare(step, point, items, digests)
        self._spent(looks=1, exchange_ns=time.perf_counter_ns() - began_ns)
        if not verdict.corrupt:
            self._agreed_step = step
            return verdict
        if self._reporter is not None:
            decided = verdict.finding == "ranks"
            self._reporter.corruption(step=step, suspects=verdict.ranks, decided=decided, reason=str(verdict))
        if self._raises:
            raise CorruptionFound(verdict)
        return verdict

    def _digests(self, items: list[Item]) -> list[int]:
        began_ns = time.perf_counter_ns()
        taken = [None if tensor is None else digest(tensor) for _, tensor in items]
        numbers = [_ABSENT if one is None else int(one) for one in taken]
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in items if tensor is not None)
        self._spent(digested_bytes=size, digest_ns=time.perf_counter_ns() - began_ns)
        return numbers

    def _compare(self, step: int, point: CheckTime, items: list[Item], digests: list[int]) -> GuardVerdict:
        """The same on all ranks."""
        header = (step, _POINTS.index(point), describe(items), combine(digests))
        headers = self._exchange(header, step)
        check_same_look(headers)
        names = [name for name, _ in items]
        if len({whole for *_, whole in headers.values()}) == 1:
            return compare(step, point, (), dict.fromkeys(headers, ()), agreed_step=self._agreed_step)
        return compare(step, point, names, self._exchange(digests, step), agreed_step=self._agreed_step)

    def _exchange(self, numbers: Sequence[int], step: int) -> dict[int, list[int]]:
        """These numbers of all replicas, by rank in the world."""
        group = self._group
        assert group is not None  # noqa: S101 - _look has checked it
        own = torch.tensor(numbers, dtype=torch.int64, device=_device_of(group))
        gathered = [torch.empty_like(own) for _ in range(group.size())]
        try:
            dist.all_gather(gathered, own, group=group)
            rows = [one.tolist() for one in gathered]
        except RuntimeError as error:
            raise PeerFailed(
                f"the guard could not exchange digests at step {step}; a rank died or did not answer in time: {error}"
            ) from error
        return dict(zip(dist.get_process_group_ranks(group), rows, strict=True))

    def _spent(self, *, looks: int = 0, digested_bytes: int = 0, digest_ns: int = 0, exchange_ns: int = 0) -> None:
        before = self._cost
        self._cost = GuardCost(
            looks=before.looks + looks,
            digested_bytes=before.digested_bytes + digested_bytes,
            digest_ns=before.digest_ns + digest_ns,
            exchange_ns=before.exchange_ns + exchange_ns,
        )


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_same_look(headers: Mapping[int, Sequence[int]]) -> None:
    """Raises `UsageError`, on all ranks, unless the first three numbers are the same: step, point and layout."""
    looks = {rank: tuple(header[:3]) for rank, header in headers.items()}
    if len(set(looks.values())) > 1:
        shown = ", ".join(
            f"rank {rank}: step {step}, {dict(enumerate(_POINTS)).get(point, '?')}, layout {layout & 0xFFFF:04x}"
            for rank, (step, point, layout) in list(looks.items())[:16]
        )
        raise UsageError(f"replicas look at different steps, or hold differently named tensors: {shown}")
