"""Programs that only become others, and calls of the API, start without what they do not use: each start counts in the
time from a submission to its first line."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SHOW = """
import sys, {module}
print(*sorted({{"asyncio", "email", "importlib.metadata", "lmdb", "uvloop"}} & {{*sys.modules}}))
"""


@pytest.mark.parametrize(
    ("module", "loaded"),
    [
        ("fireflyer", []),
        ("fireflyer.cluster.agent.start", []),
        ("fireflyer.cluster.supervisor.remote", []),
        ("fireflyer.cluster.client", ["email"]),  # http.client
        ("fireflyer.cluster.sending", ["email"]),
    ],
)
def test_a_module_that_many_processes_start_with_loads_little(module: str, loaded: list[str]) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _SHOW.format(module=module)], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == loaded
