"""What to do about a step that went wrong: a machine that sees each loss and norm, and decides.

    watching --before_commit(loss)--> commit | skip | rewind | stop
             --after_commit(norm)---> commit | skip | rewind | stop      (only where the first answer was commit)

A loss that is not finite, or a spike, is seen before the optimizer's step, and so changes nothing. The norm of the
gradients is known in that step, which then does not take place. *Skip* leaves the parameters as they are and goes on
with the next batch. *Rewind* goes back to the newest checkpoint and goes on from there with the batch after the bad
one, so the batches in between are not seen again (Chowdhery et al. 2022, "PaLM", 5.1). Both count against one limit.
Before the first checkpoint there is nothing to go back to: a rewind becomes a skip.

A spike is measured against the median of accepted losses, so one that is ignored does not hide the next. The state is
small and plain: a checkpoint keeps it. All ranks see the same numbers and so decide the same.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, Literal

import msgspec

from fireflyer.base.decoding import convert
from fireflyer.base.errors import UsageError
from fireflyer.recipes.trainer.core.recipe import PolicySettings, Reaction

__all__ = ["Action", "AnomalyPolicy", "AnomalyState", "Decision"]

Action = Literal["commit", "skip", "rewind", "stop"]
_NORMAL_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_MAX_WINDOW = 1 << 16


class Decision(msgspec.Struct, frozen=True):
    """What to do with a step, and why; no reason where nothing is wrong."""

    action: Action
    reason: str = ""


class AnomalyState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of the machine that a checkpoint keeps."""

    losses: tuple[float, ...] = ()
    """The last accepted ones, at most as many as the window has."""
    skipped: int = 0
    rewound: int = 0

    @property
    def used(self) -> int:
        """Of the limit."""
        return self.skipped + self.rewound


_COMMIT = Decision("commit")


class AnomalyPolicy:
    """See the module. `state_dict` and `load_state_dict` are those of `fireflyer.checkpoint.loop.Stateful`."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self.state = AnomalyState()

    def before_commit(self, loss: float) -> Decision:
        """The mean loss of the batch is known, the optimizer has not stepped."""
        if not math.isfinite(loss):
            return self._react(self._settings.on_not_finite, f"the loss is {loss}")
        spike = self._spike(loss)
        if spike is None or self._settings.on_spike == "ignore":
            return _COMMIT
        return self._react(self._settings.on_spike, spike)

    def after_commit(self, loss: float, norm: float) -> Decision:
        """The norm of the gradients is known. Where it is not finite the optimizer has not stepped."""
        if not math.isfinite(norm):
            return self._react(self._settings.on_not_finite, f"the norm of the gradients is {norm}")
        losses = (*self.state.losses, loss)[-self._settings.window :]
        self.state = msgspec.structs.replace(self.state, losses=losses)
        return _COMMIT

    def without_checkpoint(self, decision: Decision) -> Decision:
        """What to do in place of `decision`, the last answer, where no checkpoint has been saved yet."""
        if decision.action != "rewind":
            return decision
        state = self.state
        self.state = msgspec.structs.replace(state, skipped=state.skipped + 1, rewound=state.rewound - 1)
        return Decision("skip", f"{decision.reason}; there is no checkpoint to go back to yet")

    def went_back(self, used: AnomalyState) -> None:
        """After a rewind the losses are those of the checkpoint; what was used of the limit stays used, or a spike that
        comes again would be rewound for ever."""
        self.state = msgspec.structs.replace(self.state, skipped=used.skipped, rewound=used.rewound)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.state.losses), "skipped": self.state.skipped, "rewound": self.state.rewound}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `UsageError` for a state that is none."""
        try:
            loaded = convert(state, AnomalyState)
        except msgspec.ValidationError as error:
            raise UsageError(f"the checkpoint has no state of the policy for bad steps: {error}") from error
        if len(loaded.losses) > _MAX_WINDOW or min(loaded.skipped, loaded.rewound) < 0:
            raise UsageError("the checkpoint's state of the policy for bad steps is damaged; restore a copy of it")
        self.state = msgspec.structs.replace(loaded, losses=loaded.losses[-self._settings.window :])

    def _react(self, reaction: Reaction, what: str) -> Decision:
        if reaction == "stop":
            return Decision("stop", what)
        if self.state.used >= self._settings.limit:
            return Decision("stop", f"{what}, and {self.state.used} of {self._settings.limit} bad steps were let pass")
        if reaction == "skip":
            self.state = msgspec.structs.replace(self.state, skipped=self.state.skipped + 1)
        else:
            self.state = msgspec.structs.replace(self.state, rewound=self.state.rewound + 1)
        return Decision(reaction, what)

    def _spike(self, loss: float) -> str | None:
        losses, settings = self.state.losses, self._settings
        if len(losses) < settings.window:
            return None
        median = statistics.median(losses)
        deviation = _NORMAL_DEVIATION * statistics.median(abs(one - median) for one in losses)
        bound = median + max(settings.deviations * deviation, settings.least_rise * abs(median))
        if loss <= bound:
            return None
        return (
            f"the loss {loss:.4f} is a spike: the median of the last {len(losses)} is {median:.4f}, up to {bound:.4f}"
        )
