"""Jobs and the platform (the papers' HAI Platform). Named here is the launcher, which runs one job: it starts the ranks
on their nodes, watches them, and starts them again when some of them die. The platform, which shares nodes among tasks
of many users, is used through `cluster.client` (its HTTP API as calls) and, in scripts, `cluster.sdk`; its manager
is in `cluster.manager`, what it decides in `cluster.core`, the agents of its nodes in `cluster.agent`.

    spec = JobSpec(script="train.py", args=("--steps", "500"), nodes=2, ranks_per_node=2, max_restarts=1, run_dir=path)
    result = fireflyer.runtime.run(run_job(spec, on_entry=progress.update, on_line=print_line))
    sys.exit(result.exit_code)

`run_job` raises `UsageError` (and makes nothing) where the job cannot start as asked: script missing, port taken, more
ranks than devices, a run directory that is in use. Once started it does not raise for what happens to the job: the
result says it. It takes over SIGINT, SIGTERM and SIGHUP while it runs (they are passed on to the ranks; the second one
kills), so it is called from the main thread. `on_entry` gets every entry of the event log after it was written, in
order; `on_line` every line that a rank printed; both are called on the event loop and must not block for long.

A training script reports with `Reporter.from_environment(read_environment())`; what else it calls is in
`fireflyer.cluster.sdk`. Names are imported when they are first used, so that a rank does not load the launcher.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.base.events import ResumeReport, StepReport
    from fireflyer.cluster.launcher import HostsRefused, run_job
    from fireflyer.cluster.schema.job import Culprit, Fault, JobResult, JobSpec, RankLine, Timeouts, parse_fault
    from fireflyer.cluster.supervisor.join import JoinSpec, join_job
    from fireflyer.runtime.reporter import Reporter

__all__ = [
    "Culprit",
    "Fault",
    "HostsRefused",
    "JobResult",
    "JobSpec",
    "JoinSpec",
    "RankLine",
    "Reporter",
    "ResumeReport",
    "StepReport",
    "Timeouts",
    "join_job",
    "parse_fault",
    "run_job",
]

_HOME = {
    "Culprit": "cluster.schema.job",
    "Fault": "cluster.schema.job",
    "HostsRefused": "cluster.launcher",
    "JobResult": "cluster.schema.job",
    "JobSpec": "cluster.schema.job",
    "JoinSpec": "cluster.supervisor.join",
    "RankLine": "cluster.schema.job",
    "Reporter": "runtime.reporter",
    "ResumeReport": "base.events",
    "StepReport": "base.events",
    "Timeouts": "cluster.schema.job",
    "join_job": "cluster.supervisor.join",
    "parse_fault": "cluster.schema.job",
    "run_job": "cluster.launcher",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fireflyer.{home}"), name)
    globals()[name] = value
    return value
