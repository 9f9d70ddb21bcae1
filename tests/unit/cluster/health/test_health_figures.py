"""Figures of the health loop follow from its records alone."""

from __future__ import annotations

from collections import Counter

from tests.support.health import Floor, fault

from fireflyer.base.health_event import Severity
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.records import NodeHealth, RepairState
from fireflyer.cluster.core.platform.health_figures import MAX_CHECKS, OTHER_CHECKS, HealthFigures, health_figures

LINK = fault("infiniband", part="mlx5_0", at_once=True)


def figures(floor: Floor) -> HealthFigures:
    nodes, tickets = (row for _, row in floor.health.rows()), (row for _, row in floor.tickets.rows())
    return health_figures(nodes, tickets)


def test_faults_warnings_and_tickets_that_are_not_settled() -> None:
    floor = Floor("a", "b", "c", breaker_share=1.0, probation_ns=SECOND)
    assert figures(floor) == HealthFigures({}, 0, 0)
    floor.now_ns = 5 * SECOND
    floor.breaks("a", LINK)
    floor.now_ns = 9 * SECOND
    floor.breaks("b", LINK)
    floor.says("b", fault("mounts", "warn"), fault("mounts", "warn", part="mount:/x"))
    assert figures(floor) == HealthFigures({("infiniband", "high"): 2, ("mounts", "warn"): 1}, 2, 5 * SECOND)


def test_nodes_that_make_up_names_of_checks_make_no_more_series() -> None:
    links = [NodeHealth(name=f"a{number}", state=RepairState.SUSPECT, fault=LINK) for number in range(200)]
    lies = [
        NodeHealth(name=f"b{number}", state=RepairState.SUSPECT, fault=fault(f"made_up_{number}", "low"))
        for number in range(200)
    ]
    found = health_figures([*links, *lies], ()).findings
    assert len({check for check, _ in found}) == MAX_CHECKS + 1
    assert found["infiniband", "high"] == 200
    counted: Counter[Severity] = Counter()
    for (_, severity), count in found.items():
        counted[severity] += count
    assert counted == {"low": 200, "high": 200}
    assert found[OTHER_CHECKS, "low"] == 200 - (MAX_CHECKS - 1)
