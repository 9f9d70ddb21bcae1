"""Dispatch and combine of tokens to experts on other ranks, in two hops: to the node, then to the rank.

`Dispatcher` moves rows, `ExpertPlacement` says where experts are; what other modules name may change.
"""

from fireflyer.collectives.dispatch.dispatcher import Dispatcher, InFlightDispatch
from fireflyer.collectives.dispatch.hops import Dispatched, Routed
from fireflyer.collectives.dispatch.placement import ExpertPlacement

__all__ = ["Dispatched", "Dispatcher", "ExpertPlacement", "InFlightDispatch", "Routed"]
