"""Health events of a node whose devices are files: what the agent of `test_planted_faults.py` starts.

The shipped checks, with their policy and the counters of the rounds before, look at the tree `root`, call the programs
in `tools`, and read the kernel's records from `kmsg`; all three are in the directory that NODE_DIRECTORY names.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from fireflyer.base.errors import FireflyerError
from fireflyer.validators.checks.rounds import HealthRounds
from fireflyer.validators.checks.state_file import StateFile
from fireflyer.validators.core.checks.kernel_log import parse_kmsg
from fireflyer.validators.core.checks.policy import HealthPolicy

CHECKS = (
    "infiniband", "gpu_count", "gpu_ecc", "gpu_xid", "disk_space", "time_offset", "memory_errors", "site_memory",
)  # fmt: skip


def main() -> None:
    node = Path(os.environ["NODE_DIRECTORY"])
    only = sys.argv[2:] if sys.argv[1:2] == ["--check"] else CHECKS
    policy = msgspec.toml.decode((node / "policy.toml").read_bytes(), type=HealthPolicy)
    rounds = HealthRounds(StateFile(str(node / "state")), root=str(node / "root"), tool_path=str(node / "tools"))
    events = [one for one in rounds.run(policy, only, kernel_log=False) if one.check in CHECKS]
    if "gpu_xid" in only:
        started_ns = time.time_ns() - time.monotonic_ns()
        parsed = [parse_kmsg(line, started_ns) for line in (node / "kmsg").read_bytes().splitlines()]
        events += rounds.judge_log(policy, [record for record in parsed if record is not None])
    for event in events:
        print(msgspec.json.encode(event).decode())


if __name__ == "__main__":
    try:
        main()
    except FireflyerError as error:
        sys.exit(str(error))
