"""What a fleet is, and what befalls it. All of it was fixed before anything was measured.

From Kokolis, Kuchnik et al. 2024 (arXiv:2410.21680): 2,000 nodes of 8 GPUs, 83 % of them in use (II-A), 6.5 failures
for 1,000 node-days, lemons included (III), 1.2 % lemons (IV-A), checks every 5 min (II-C). Lemons are 1.2 % of the
nodes exactly: 24 of 2,000. Everything else here is assumed, and can be set.
"""

from __future__ import annotations

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = ["DAY_NS", "HOUR_NS", "FleetSettings"]

HOUR_NS = 3600 * SECOND
DAY_NS = 24 * HOUR_NS


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `UsageError`."""

    nodes: int = 2000
    days: int = 90
    large_nodes: int = 64
    """Tasks of so many and more are large: 512 GPUs."""
    demand: float = 0.83
    """Work over node-time."""
    per_1000_node_days: float = 6.5
    """Faults of all nodes, lemons included. A fault that lasts counts once."""
    lemon_share: float = 0.012
    lemon_factor: float = 20.0
    """Faults of a lemon over those of another node."""
    again_ns: int = 4 * HOUR_NS
    """Of runs on a node with a fault that lasts: the mean time until it ends them."""
    noticed_ns: int = 6 * HOUR_NS
    """Median from the first run that such a fault ended until a person takes the node out, where no check does."""
    warned_ns: int = DAY_NS
    """Of faults that checks see coming: the mean time from the first sign until a run is ended."""
    flaps_per_1000_node_days: float = 1.0
    """Reports of faults that are none, of any node."""
    check_every_ns: int = 300 * SECOND
    reset_ns: int = HOUR_NS // 2
    """Medians of what an operator needs for each remedy, from the moment when it is due."""
    reboot_ns: int = HOUR_NS
    diagnosis_ns: int = DAY_NS
    replacement_ns: int = 3 * DAY_NS
    """Of a part, or of a whole node."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("nodes", 1, 100_000), ("days", 1, 3660), ("large_nodes", 1, 100_000), ("demand", 0.01, 100.0),
            ("lemon_share", 0.0, 0.5), ("per_1000_node_days", 0.001, 10_000.0), ("lemon_factor", 1.0, 1000.0),
            ("flaps_per_1000_node_days", 0.0, 10_000.0),
        ):  # fmt: skip
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} must be between {least:,} and {most:,}, not {getattr(self, name)}")
        for name in self.__struct_fields__:
            if name.endswith("_ns") and not SECOND <= getattr(self, name) <= 366 * DAY_NS:
                raise UsageError(f"{name} must be between a second and a year")

    @property
    def lemons(self) -> int:
        return round(self.lemon_share * self.nodes)

    @property
    def end_ns(self) -> int:
        return self.days * DAY_NS

    @property
    def sound_per_day(self) -> float:
        """Faults of a node that is no lemon."""
        share = self.lemons / self.nodes
        return self.per_1000_node_days / 1000 / (1 - share + share * self.lemon_factor)
