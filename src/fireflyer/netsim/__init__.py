"""Simulation of networks: transfers over a fabric at max-min fair rates, with routing and dependencies. Pure."""

from fireflyer.netsim.back_pressure import BackPressure, BackPressureRun, simulate_back_pressure
from fireflyer.netsim.failures import LinkFailure
from fireflyer.netsim.fair import Incidence, max_min_rates
from fireflyer.netsim.latencies import LATENCIES, LatencyName, LinkLatency
from fireflyer.netsim.links import Hop, Links
from fireflyer.netsim.paths import simulate_paths
from fireflyer.netsim.patterns import Pattern, first_rates, pattern_transfers
from fireflyer.netsim.routing import Flow, Router, Routing
from fireflyer.netsim.simulate import Engine, NetworkRun, Settings, simulate

__all__ = [
    "LATENCIES",
    "BackPressure",
    "BackPressureRun",
    "Engine",
    "Flow",
    "Hop",
    "Incidence",
    "LatencyName",
    "LinkFailure",
    "LinkLatency",
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
    "simulate_back_pressure",
    "simulate_paths",
]
