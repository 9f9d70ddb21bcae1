"""Sums over all ranks of a job in CPU memory (the papers' HFReduce): shared memory inside a node, a double binary tree
over TCP between nodes."""

from fireflyer.collectives.communicator import Communicator, Stats
from fireflyer.collectives.cost import Speeds
from fireflyer.collectives.plan import Orientation, Plan, Route, Tree, double_binary_tree, make_plan, orient
from fireflyer.collectives.routing import plan_for
from fireflyer.collectives.work import Work

__all__ = [
    "Communicator",
    "Orientation",
    "Plan",
    "Route",
    "Speeds",
    "Stats",
    "Tree",
    "Work",
    "double_binary_tree",
    "make_plan",
    "orient",
    "plan_for",
]
