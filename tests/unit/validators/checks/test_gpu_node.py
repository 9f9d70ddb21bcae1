"""The node with eight GPUs of the benchmark of a round: each check comes to a result there, and finds no fault."""

from __future__ import annotations

from pathlib import Path

import msgspec
from bench.operators.gpu_node import RULES, make_gpu_node

from fireflyer.validators.checks.rounds import HealthRounds
from fireflyer.validators.core.checks.catalogue import CHECKS
from fireflyer.validators.core.checks.policy import HealthPolicy


def test_each_check_comes_to_a_result(tmp_path: Path) -> None:
    root, tools = make_gpu_node(tmp_path)
    policy = msgspec.toml.decode(RULES, type=HealthPolicy)
    names = [check.name for check in CHECKS if check.name != "gpu_dcgm"]
    events = HealthRounds(None, root=root, tool_path=tools).run(policy, names, idle=True)
    events = [event for event in events if "needs root" not in event.words]
    assert [(event.check, event.words) for event in events if event.could_not_run or event.severity != "ok"] == []
