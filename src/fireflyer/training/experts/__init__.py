"""Experts of a layer on several ranks.

`shard_experts` divides the layers of a model over the expert groups of a plan, `ExpertDispatch` moves tokens as steps
of autograd; what other modules name may change.
"""

from fireflyer.training.experts.exchange import ArrivedTokens, ExpertDispatch, InFlightCombine, InFlightTokens
from fireflyer.training.experts.layers import NotSplit, own_experts
from fireflyer.training.experts.sharding import SplitExperts, shard_experts

__all__ = [
    "ArrivedTokens",
    "ExpertDispatch",
    "InFlightCombine",
    "InFlightTokens",
    "NotSplit",
    "SplitExperts",
    "own_experts",
    "shard_experts",
]
