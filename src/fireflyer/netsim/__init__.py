"""Simulation of networks: transfers over a fabric at max-min fair rates, with routing and dependencies. Pure."""

from fireflyer.netsim.fair import Incidence, max_min_rates
from fireflyer.netsim.links import Hop, Links
from fireflyer.netsim.patterns import Pattern, first_rates, pattern_transfers
from fireflyer.netsim.routing import Flow, Router, Routing
from fireflyer.netsim.simulate import NetworkRun, Settings, simulate

__all__ = [
    "Flow",
    "Hop",
    "Incidence",
    "Links",
    "NetworkRun",
    "Pattern",
    "Router",
    "Routing",
    "Settings",
    "first_rates",
    "max_min_rates",
    "pattern_transfers",
    "simulate",
]
