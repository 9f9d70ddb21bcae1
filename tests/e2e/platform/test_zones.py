"""A task that lies in two zones: its ranks' collectives are told so, and cross by one pair of nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.cluster.core.platform.commands import SetPolicy
from fireflyer.cluster.core.scheduler.model import Policy
from fireflyer.cluster.schema.tasks import FINISHED, Outcome
from fireflyer.collectives import Plan
from fireflyer.collectives.planning.crossings import crossings

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT: Final = """\
import json, sys
import msgspec
import numpy as np
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

with Communicator.from_environment(read_environment()) as comm:
    array = np.ones(1000, np.float32)
    comm.allreduce(array)
    assert array[0] == comm.world_size
    if comm.rank == 0:
        with open(sys.argv[1], "w") as result:
            json.dump({"hosts": comm.hosts, "plan": msgspec.to_builtins(comm.plan)}, result)
"""


def test_ranks_know_their_hosts_by_the_platforms_names_and_their_plan_crosses_by_one_pair(tmp_path: Path) -> None:
    script, result = tmp_path / "sum.py", tmp_path / "result"
    script.write_text(SCRIPT)
    with RunningPlatform(tmp_path / "platform", nodes=4, zones=2) as platform:
        client = platform.client()
        client.command(SetPolicy(Policy(cross_zone_nodes=3)))
        (task,) = client.submit(task_of(script, "sum", str(result), nodes=4), key="sum")
        wait_for(lambda: client.task(task).task.state is FINISHED, "it ends", limit_s=60)
        answer = client.task(task).task
        zone_of = {node.name: node.zone for node in client.nodes()}
    assert answer.outcome is Outcome.SUCCEEDED, answer.reason
    found = json.loads(result.read_text())
    zones = [zone_of[host] for host in found["hosts"]]
    assert sorted(zones) == ["zone-1", "zone-1", "zone-2", "zone-2"]
    pairs = crossings(msgspec.convert(found["plan"], Plan), [int(zone == "zone-2") for zone in zones])
    assert pairs.keys() == {"double_binary_tree", "line"}
    assert pairs["line"] == pairs["double_binary_tree"]
    assert len(pairs["line"]) == 1
