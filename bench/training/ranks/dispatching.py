"""One rank of a dispatch and a combine: ours, and what `all_to_all_single` of gloo takes for one copy of each token and
rank, without routes, repeated rows and sums."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from bench.collectives.ranks.orders import join_ours, obey
from fireflyer.collectives.dispatch import Dispatcher, ExpertPlacement

Array = np.ndarray[Any, Any]
_BYTE: Final = torch.uint8


class Rank:
    orders: tuple[str, ...] = ("prepare", "time", "check")

    def __init__(self, arguments: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.rank: int = arguments["rank"]
        self.world_size: int = arguments["world_size"]
        self.comm = join_ours(arguments)
        dist.init_process_group(
            "gloo", init_method=f"file://{arguments['rendezvous']}", rank=self.rank, world_size=self.world_size
        )
        self.dispatchers: dict[str, Dispatcher] = {}
        self.nodes: list[int] = list(self.comm.plan.node_of_rank)

    def prepare(self, tokens: str, width: str, experts: str, per_token: str, codec: str) -> dict[str, Any]:
        """Tokens and choices, drawn from the rank's number, and what gloo is to send."""
        count, self.width, of, each = int(tokens), int(width), int(experts), int(per_token)
        rng = np.random.default_rng(self.rank)
        bits = rng.standard_normal((count, self.width), np.float32).view(np.uint32) >> 16
        self.values = bits.astype(np.uint16)
        self.choices = rng.random((count, of)).argpartition(each, axis=1)[:, :each].astype(np.int64)
        self.placement = ExpertPlacement.even(of, self.nodes)
        for dispatcher in self.dispatchers.values():
            dispatcher.close()
        self.dispatchers = {
            codec: Dispatcher(
                self.comm, self.placement, width=self.width, per_token=each, max_tokens=count, dtype="bf16",
                dispatch_codec=codec, combine_codec=codec,
            )
        }  # fmt: skip
        self.dispatcher = self.dispatchers[codec]
        self.arrived = self.dispatcher.start_dispatch(self.values, self.choices).wait()
        self._prepare_gloo()
        return {"rows": int(self.sent.sum())}

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

    def check(self, _: str) -> dict[str, Any]:
        return {"right": True}

    def close(self) -> None:
        for dispatcher in self.dispatchers.values():
            dispatcher.close()
        dist.destroy_process_group()
        self.comm.close()

    def _call(self, what: str) -> Callable[[], object]:
        there, back = self.received.tolist(), self.sent.tolist()
        return {
            "dispatch": lambda: self.dispatcher.start_dispatch(self.values, self.choices).wait(),
            "combine": lambda: self.dispatcher.start_combine(self.arrived.routed, self.arrived.rows).wait(),
            "gloo-dispatch": lambda: dist.all_to_all_single(self.incoming, self.outgoing, there, back),
            "gloo-combine": lambda: dist.all_to_all_single(self.outgoing, self.incoming, back, there),
        }[what]


if __name__ == "__main__":
    obey(Rank(json.loads(sys.argv[2])))
