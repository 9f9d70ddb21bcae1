"""The seeded world: a clock, a network, disks, crashes and restarts, replayed byte for byte from one seed."""

from fireflyer.sim.disk import Fault, FaultKind, MountedDisk, OperationRecord, SimDisk
from fireflyer.sim.driver import Machine, MachineDriver
from fireflyer.sim.files import BLOCK_BYTES, DataFate, Outcome, Pending
from fireflyer.sim.net import Link, SimNet
from fireflyer.sim.outcomes import choose_outcome, enumerate_outcomes
from fireflyer.sim.world import SimClock, SimCrash, SimNode, Timer, Trace, World

__all__ = [
    "BLOCK_BYTES",
    "DataFate",
    "Fault",
    "FaultKind",
    "Link",
    "Machine",
    "MachineDriver",
    "MountedDisk",
    "OperationRecord",
    "Outcome",
    "Pending",
    "SimClock",
    "SimCrash",
    "SimDisk",
    "SimNet",
    "SimNode",
    "Timer",
    "Trace",
    "World",
    "choose_outcome",
    "enumerate_outcomes",
]
