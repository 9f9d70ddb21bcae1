"""What a rank does in the tests of dispatches between processes; run by `collective_scenarios`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.support.collectives.dispatching import combined, expected_rows, random_choices, travelled
from tests.support.ranks.exchange_scenarios import fail, say

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives import Communicator
from fireflyer.collectives.dispatch import Dispatcher, ExpertPlacement

__all__ = ["SCENARIOS"]

Array = npt.NDArray[Any]
EXPERTS, PER_TOKEN, WIDTH = 8, 3, 16
CODECS = [("f32", "f32"), ("bf16", "bf16"), ("fp8", "bf16"), ("logfmt10", "logfmt8")]


class Layer:
    """Experts tanh(x W), the tokens of all ranks, and what a dense layer makes of them: loss sum(y^2) and gradients."""

    def __init__(self, ranks: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.matrices = rng.standard_normal((EXPERTS, WIDTH, WIDTH))
        counts = rng.integers(0, 9, ranks)
        self.tokens = [rng.standard_normal((count, WIDTH)) for count in counts]
        self.choices = [random_choices(rng, int(count), PER_TOKEN, EXPERTS, "even") for count in counts]
        self.weights = [rng.random(choice.shape) for choice in self.choices]

    def dense(self, rank: int) -> tuple[Array, Array, Array]:
        """y, gradient of tokens, gradient of weights."""
        x, weights = self.tokens[rank], self.weights[rank]
        every = np.tanh(np.einsum("tw,ewv->tev", x, self.matrices))
        picked = np.take_along_axis(every, self.choices[rank][..., None], axis=1)
        y = (picked * weights[..., None]).sum(axis=1)
        before = 2 * y[:, None] * weights[..., None] * (1 - picked**2)
        back = np.einsum("tkv,tkwv->tw", before, self.matrices[self.choices[rank]])
        return y, back, np.einsum("tv,tkv->tk", 2 * y, picked)

    def spread(self, dispatcher: Dispatcher, rank: int) -> tuple[Array, Array, Array]:
        """The same, by the experts of all ranks."""
        arrived = dispatcher.start_dispatch(self.tokens[rank], self.choices[rank], self.weights[rank]).wait()
        matrices = np.repeat(self.matrices[dispatcher.placement.experts_of(rank)], arrived.counts, axis=0)
        outputs = np.tanh(np.einsum("nw,nwv->nv", arrived.rows, matrices))
        y, _ = dispatcher.start_combine(arrived.routed, outputs * arrived.weights[:, None]).wait()
        gradient = dispatcher.start_rows(arrived.routed, 2 * y).wait()
        before = gradient * arrived.weights[:, None] * (1 - outputs**2)
        back = np.einsum("nv,nwv->nw", before, matrices)
        of_weights = np.einsum("nv,nv->n", gradient, outputs)
        of_tokens, alone = dispatcher.start_combine(arrived.routed, back, of_weights).wait()
        assert alone is not None
        return y, of_tokens, alone


def endless_dispatch(comm: Communicator, params: dict[str, Any]) -> None:
    """Layers beside the dense one, until one fails or `steps` are done. The rank `slow` waits for a line at step 2."""
    placement = ExpertPlacement.even(EXPERTS, comm.plan.node_of_rank)
    dispatcher = Dispatcher(
        comm, placement, width=WIDTH, per_token=PER_TOKEN, max_tokens=8, dtype="f64",
        dispatch_codec="f64", combine_codec="f64",
    )  # fmt: skip
    step, worst = 0, 0.0
    while step != params.get("steps"):
        if step == 2 and comm.rank == params.get("slow"):
            say("waits")
            sys.stdin.readline()
        try:
            layer = Layer(comm.world_size, step)
            for found, expected in zip(layer.spread(dispatcher, comm.rank), layer.dense(comm.rank), strict=True):
                if expected.size:
                    worst = max(worst, float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
        except FireflyerError as error:
            fail("failed", error, step)
            sys.stdin.read()
            return
        step += 1
        say("step", step=step, worst=worst)
    dispatcher.close()


def random_routings(comm: Communicator, params: dict[str, Any]) -> None:
    """`count` of them, with several codecs, each bit beside the plain oracle."""
    width = 128
    placement = ExpertPlacement([0, 3, 1, 1, 2, 0, 3, 2, 2], comm.plan.node_of_rank)
    dispatchers = [
        Dispatcher(
            comm, placement, width=width, per_token=PER_TOKEN, max_tokens=6, dtype="f32",
            dispatch_codec=one, combine_codec=other,
        )
        for one, other in CODECS
    ]  # fmt: skip
    different = 0
    for number in range(params["count"]):
        rng = np.random.default_rng(number)
        dispatcher, codecs = dispatchers[number % len(CODECS)], CODECS[number % len(CODECS)]
        kind = ("even", "one", "few")[number // len(CODECS) % 3]
        counts = rng.choice([0, 1, 2, 6], comm.world_size)
        values = [rng.standard_normal((count, width)).astype(np.float32) for count in counts]
        choices = [random_choices(rng, int(count), PER_TOKEN, placement.experts, kind) for count in counts]
        arrived = dispatcher.start_dispatch(values[comm.rank], choices[comm.rank]).wait()
        found, _ = dispatcher.start_combine(arrived.routed, arrived.rows).wait()
        expected = expected_rows(values, choices, choices, placement, comm.rank, codecs[0])
        rows = np.array([one[3] for one in expected], np.float32).reshape(-1, width)
        different += not np.array_equal(arrived.rows, rows)
        sent = travelled(values[comm.rank], codecs[0], np.float32)
        for token, chosen in enumerate(choices[comm.rank]):
            parts = {int(expert): sent[token : token + 1] for expert in chosen}
            different += not np.array_equal(found[token], combined(parts, placement, codecs[1], np.float32)[0])
    say("compared", different=different)


SCENARIOS: dict[str, Callable[[Communicator, dict[str, Any]], None]] = {
    function.__name__: function for function in (endless_dispatch, random_routings)
}
