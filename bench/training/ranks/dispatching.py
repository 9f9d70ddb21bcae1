"""One rank of a dispatch and a combine: ours, and what `all_to_all_single` of gloo takes for one copy of each token and
rank, without routes, repeated rows and sums."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from bench.collectives.ranks.orders import join_ours, obey
from fireflyer.collectives.dispatch import Dispatcher, ExpertPlacement

Array = npt.NDArray[Any]
_ERROR: Final = 0.1
"""Of the norm: above that of any codec."""


class Rank:
    orders: tuple[str, ...] = ("prepare", "time", "cost", "check")

    def __init__(self, arguments: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.rank: int = arguments["rank"]
        self.world_size: int = arguments["world_size"]
        self.comm = join_ours(arguments)
        dist.init_process_group(
            "gloo", init_method=f"file://{arguments['rendezvous']}", rank=self.rank, world_size=self.world_size
        )
        self.dispatcher: Dispatcher | None = None

    def prepare(self, tokens: str, width: str, experts: str, per_token: str, codec: str) -> dict[str, Any]:
        """Tokens and choices, drawn from the rank's number, and what gloo is to send. Copies of a token: one for each
        of its experts, of its ranks, of its nodes."""
        count, self.width, of, self.per_token = int(tokens), int(width), int(experts), int(per_token)
        rng = np.random.default_rng(self.rank)
        bits = rng.standard_normal((count, self.width), np.float32).view(np.uint32) >> 16
        self.values = bits.astype(np.uint16)
        self.choices = rng.random((count, of)).argpartition(self.per_token, axis=1)[:, : self.per_token]
        self.placement = ExpertPlacement.even(of, self.comm.plan.node_of_rank)
        if self.dispatcher is not None:
            self.dispatcher.close()
        self.dispatcher = Dispatcher(
            self.comm, self.placement, width=self.width, per_token=self.per_token, max_tokens=count, dtype="bf16",
            dispatch_codec=codec, combine_codec=codec,
        )  # fmt: skip
        before = self.dispatcher.sent_bytes
        self.arrived = self.dispatcher.start_dispatch(self.values, self.choices).wait()
        there = self.dispatcher.sent_bytes - before
        self.dispatcher.start_combine(self.arrived.routed, self.arrived.rows).wait()
        back = self.dispatcher.sent_bytes - before - there
        self._prepare_gloo()
        nodes = [np.unique(one).size for one in self.placement.node_of_expert[self.choices]]
        return {
            "dispatch_bytes": int(there.sum()),
            "combine_bytes": int(back.sum()),
            "gloo_bytes": int(np.delete(self.sent, self.rank).sum()) * self.width * 2,
            "copies": [self.per_token, float(self.sent.sum() / count), float(np.mean(nodes))],
        }

    def _prepare_gloo(self) -> None:
        """One copy of a token for each rank that has one of its experts."""
        ranks = self.placement.rank_of_expert[self.choices]
        needs = np.zeros((len(self.values), self.world_size), bool)
        np.put_along_axis(needs, ranks, True, axis=1)
        self.sent = needs.sum(axis=0)
        every = [torch.zeros(self.world_size, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(every, torch.from_numpy(self.sent.astype(np.int64)))
        self.received = np.array([int(one[self.rank]) for one in every])
        order = np.concatenate([np.flatnonzero(needs[:, rank]) for rank in range(self.world_size)])
        copies = self.values[order].view(np.int16)
        self.outgoing = torch.from_numpy(copies).view(torch.bfloat16)
        self.incoming = torch.empty((int(self.received.sum()), self.width), dtype=torch.bfloat16)

    def time(self, what: str, loops: str) -> dict[str, Any]:
        """Seconds from a common start until this rank has what arrives."""
        call = self._call(what)
        each = []
        self.comm.barrier()
        for _ in range(int(loops)):
            begun = time.perf_counter()
            call()
            each.append(time.perf_counter() - begun)
        return {"seconds": sum(each), "p50": sorted(each)[len(each) // 2], "p99": max(each)}

    def cost(self, what: str, loops: str) -> dict[str, Any]:
        """Processor seconds of one call, of all threads: what a call takes does not depend on other programs."""
        call = self._call(what)
        self.comm.barrier()
        before = _processor_s()
        for _ in range(int(loops)):
            call()
        return {"processor_s": (_processor_s() - before) / int(loops)}

    def check(self, what: str) -> dict[str, Any]:
        """Whether a dispatch and a combine of what arrived give each token as often as it has experts."""
        if not what.startswith("both"):
            return {"right": True}
        assert self.dispatcher is not None
        arrived = self.dispatcher.start_dispatch(self.values, self.choices).wait()
        summed, _ = self.dispatcher.start_combine(arrived.routed, arrived.rows).wait()
        expected = _floats(self.values) * self.per_token
        return {"right": bool(np.linalg.norm(_floats(summed) - expected) <= _ERROR * np.linalg.norm(expected))}

    def close(self) -> None:
        if self.dispatcher is not None:
            self.dispatcher.close()
        dist.destroy_process_group()
        self.comm.close()

    def _call(self, what: str) -> Callable[[], object]:
        assert self.dispatcher is not None
        ours, there, back = self.dispatcher, self.received.tolist(), self.sent.tolist()

        def both() -> None:
            arrived = ours.start_dispatch(self.values, self.choices).wait()
            ours.start_combine(arrived.routed, arrived.rows).wait()

        def gloo_both() -> None:
            dist.all_to_all_single(self.incoming, self.outgoing, there, back)
            dist.all_to_all_single(self.outgoing, self.incoming, back, there)

        return {
            "dispatch": lambda: ours.start_dispatch(self.values, self.choices).wait(),
            "combine": lambda: ours.start_combine(self.arrived.routed, self.arrived.rows).wait(),
            "both": both,
            "gloo-dispatch": lambda: dist.all_to_all_single(self.incoming, self.outgoing, there, back),
            "gloo-combine": lambda: dist.all_to_all_single(self.outgoing, self.incoming, back, there),
            "gloo-both": gloo_both,
        }[what]


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _floats(values: Array) -> Array:
    return (values.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    obey(Rank(json.loads(sys.argv[2])))
