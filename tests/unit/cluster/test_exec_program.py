"""Ports of a run: which addresses of the node lead to its processes, and to nobody else."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fireflyer.cluster.agent.exec_program import addresses_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6"),
]
RUN = "5eed5eed5eed0707"
LISTEN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family, dualstack_ipv6=sys.argv[3] == "both")
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def listening(host: str, port: int = 0, kind: str = "one") -> Iterator[int]:
    """A process of the run."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, host, str(port), kind],
        env={"FF_JOB_TOKEN": RUN}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


@pytest.mark.parametrize(
    ("host", "kind", "found"),
    [("127.0.0.1", "one", ["127.0.0.1"]), ("::1", "one", ["::1"]), ("::", "both", ["127.0.0.1", "::1"])],
)
def test_a_port_of_the_run_is_found_at_its_addresses(host: str, kind: str, found: list[str]) -> None:
    with listening(host, kind=kind) as port:
        assert addresses_of(RUN, port) == found
        assert addresses_of("5eed5eed5eed0708", port) == []


def test_another_program_at_the_same_port_is_not_reached_by_a_socket_of_the_run_for_ipv6() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with listening("::", port):
            assert addresses_of(RUN, port) == ["::1"]
