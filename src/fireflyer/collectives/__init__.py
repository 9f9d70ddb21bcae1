"""Sums over all ranks of a job in CPU memory (the papers' HFReduce): shared memory inside a node, a double binary tree
over TCP between nodes.

`Communicator` is a group: `create` and `from_environment` make one, `reform`, `leave` and `join` change who is in it.
A `Plan` says how it sums: `make_plan` writes one down, `plan_for` chooses by declared `Speeds`, `tune` measures them,
`explain` says why, and `traffic` makes transfers of an operation for network simulators. The modules say more; what is
not named here may change.
"""

from fireflyer.collectives.communicator import Communicator, Stats
from fireflyer.collectives.planning.cost import Speeds
from fireflyer.collectives.planning.plan import Plan, Route, make_plan
from fireflyer.collectives.planning.routing import explain, plan_for
from fireflyer.collectives.planning.traffic import traffic
from fireflyer.collectives.tuning import Tuning, tune
from fireflyer.collectives.work import Work

__all__ = [
    "Communicator",
    "Plan",
    "Route",
    "Speeds",
    "Stats",
    "Tuning",
    "Work",
    "explain",
    "make_plan",
    "plan_for",
    "traffic",
    "tune",
]
