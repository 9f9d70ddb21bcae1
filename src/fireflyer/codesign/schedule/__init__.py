"""Pipeline schedules as data, and the simulator that times them.

`build_schedule` gives the rows of a schedule by its name, `check` says whether a schedule of any origin is complete and
free of deadlocks, `compile_schedule` and `simulate` time it, `peak_activations` counts its memory, `choose_layout`
keeps pipelines that share a NIC apart, `balance` cuts unequal layers into stages, `with_messages` gives an executor
what each rank does, with sends and receives, and `pipeline_transfers` gives it to a network simulator. For example, the
bubble of 1F1B on 8 ranks:

    program = compile_schedule(build_schedule("1f1b", 8, 32))
    costs = uniform_costs(program.schedule.placement, forward=1, backward=2, weights=1)
    simulate(program, costs).bubble_s                       # 21.0: (8 - 1) * (1 + 2)
"""

from fireflyer.codesign.schedule.actions import Action, Kind, Pair, Placement, Schedule
from fireflyer.codesign.schedule.balance import Balance, balance
from fireflyer.codesign.schedule.catalog import SCHEDULES, build_schedule, compiled
from fireflyer.codesign.schedule.contention import Choice, Layout, Policy, Sharing, choose_layout, simulate_shared
from fireflyer.codesign.schedule.costs import Costs, uniform_costs
from fireflyer.codesign.schedule.execution import Message, with_messages
from fireflyer.codesign.schedule.lifetimes import InFlight, in_flight, last_gradients, peak_activations
from fireflyer.codesign.schedule.program import Program, compile_schedule
from fireflyer.codesign.schedule.timing import Parts, Timeline, simulate
from fireflyer.codesign.schedule.transfers import MessageBytes, pipeline_transfers
from fireflyer.codesign.schedule.validity import check

__all__ = [
    "SCHEDULES",
    "Action",
    "Balance",
    "Choice",
    "Costs",
    "InFlight",
    "Kind",
    "Layout",
    "Message",
    "MessageBytes",
    "Pair",
    "Parts",
    "Placement",
    "Policy",
    "Program",
    "Schedule",
    "Sharing",
    "Timeline",
    "balance",
    "build_schedule",
    "check",
    "choose_layout",
    "compile_schedule",
    "compiled",
    "in_flight",
    "last_gradients",
    "peak_activations",
    "pipeline_transfers",
    "simulate",
    "simulate_shared",
    "uniform_costs",
    "with_messages",
]
