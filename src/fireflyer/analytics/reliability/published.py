"""Figures of the reliability paper (arXiv:2410.21680) beside what its own formulas and tables give. Pure.

Where they disagree the row says so: nothing is fitted. A row holds the bounds within which a value is printed as it is.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fireflyer.analytics.ettr import daly_young_interval_s, expected_ettr_long_run, failure_rate_per_s, mttf_s

__all__ = ["RSC1_FAILURES_PER_NODE_DAY", "RSC2_FAILURES_PER_NODE_DAY", "PublishedFigure", "published_figures"]

RSC1_FAILURES_PER_NODE_DAY = 6.5e-3
"""Failures of jobs of more than 128 GPUs on RSC-1 (paper, III)."""
RSC2_FAILURES_PER_NODE_DAY = 2.34e-3
_GPUS_PER_NODE = 8
_LEMON_CAUSES = {
    "Optics": 2.6, "CPU": 2.6, "PSU": 5.1, "NIC": 7.7, "EUD": 10.3, "PCIE": 15.4, "DIMM": 20.5, "GPU": 28.2, "BIOS": 7.7
}  # fmt: skip


class PublishedFigure(NamedTuple):
    what: str
    printed: str
    computed: float
    unit: str
    bounds: tuple[float, float]
    """Between which a value is printed as it is."""
    why: str

    @property
    def verdict(self) -> Literal["follows", "does not follow"]:
        low, high = self.bounds
        return "follows" if low <= self.computed <= high else "does not follow"


def published_figures() -> tuple[PublishedFigure, ...]:
    """Every figure that can be computed again."""
    return (*_mttf_rows(), *_ettr_rows(), *_lemon_rows())


def _mttf_rows() -> tuple[PublishedFigure, ...]:
    def hours(gpus: int) -> float:
        return mttf_s(gpus // _GPUS_PER_NODE, RSC1_FAILURES_PER_NODE_DAY) / 3600

    line = "24 h / (GPUs / 8 · 6.5e-3)"
    empirical = "measured on jobs of that size: not on the line of 6.5 per 1000 node-days; it needs"
    return (
        PublishedFigure("MTTF of 16384 GPUs", "1.8", hours(16384), "h", (1.75, 1.85), line),
        PublishedFigure("MTTF of 131072 GPUs", "0.23", hours(131072), "h", (0.225, 0.235), line),
        PublishedFigure("MTTF of 1024 GPUs", "7.9", hours(1024), "h", (7.85, 7.95), f"{empirical} 23.7"),
        PublishedFigure("MTTF of 8 GPUs", "47.7", hours(8) / 24, "d", (47.65, 47.75), f"{empirical} 21.0"),
        PublishedFigure("MTTF of 4096 GPUs", "around 10", hours(4096), "h", (9.5, 10.5), f"{empirical} 4.7"),
    )


def _ettr_rows() -> tuple[PublishedFigure, ...]:
    def ratio(gpus: int, per_node_day: float, stall_s: float) -> float:
        rate = failure_rate_per_s(gpus // _GPUS_PER_NODE, per_node_day)
        period_s = daly_young_interval_s(stall_s=stall_s, failures_per_s=rate)
        return expected_ettr_long_run(failures_per_s=rate, restart_s=300, period_s=period_s, stall_s=stall_s)

    rsc1 = RSC1_FAILURES_PER_NODE_DAY
    how = "formula 2, u0 = 5 min, Daly-Young period, w ="
    return (
        PublishedFigure("ETTR of 2048 GPUs", "0.85 to 0.9", ratio(2048, rsc1, 300), "", (0.845, 0.905), f"{how} 5 min"),
        PublishedFigure("ETTR of 4096 GPUs", "0.85 to 0.9", ratio(4096, rsc1, 300), "", (0.845, 0.905), f"{how} 5 min"),
        PublishedFigure("ETTR of 12000 GPUs", "≥ 0.9", ratio(12000, rsc1, 10), "", (0.895, 1.0), f"{how} 10 s"),
        PublishedFigure(
            "ETTR of 12000 GPUs at 1 failure per 1000 node-days", "≥ 0.9", ratio(12000, 1e-3, 300), "", (0.895, 1.0),
            f"{how} 5 min",
        ),
        PublishedFigure(
            "ETTR of 12000 GPUs as RSC-1 is", "below 0.9", ratio(12000, rsc1, 300), "", (0.0, 0.895), f"{how} 5 min"
        ),
    )  # fmt: skip


def _lemon_rows() -> tuple[PublishedFigure, ...]:
    fractions = [round(share * 39 / 100) for share in _LEMON_CAUSES.values()]
    return (
        PublishedFigure("Lemon nodes of RSC-1", "1.2", 24 / 2000 * 100, "%", (1.15, 1.25), "24 of 2000 nodes"),
        PublishedFigure("Causes of lemon nodes", "100", sum(fractions) / 39 * 100, "%", (99.95, 100.05),
                        "table II, each a whole number of 39ths; its printed shares add up to 100.1"),
        PublishedFigure("Fewer failures of jobs of 512 GPUs and more", "10", 14.0 - 4.0, "points", (9.5, 10.5),
                        "from 14 % to 4 %"),
        PublishedFigure("More large jobs that complete", "over 30", (96 / 86 - 1) * 100, "%", (30.0, 1000.0),
                        "86 % to 96 % of jobs is a rise by 11.6 %; the failures fall by 71 %"),
    )  # fmt: skip
