"""PostgreSQL on a machine, at its address: for programs on the others."""

from __future__ import annotations

import subprocess
import time
from typing import Final

from tests.support.kvstore.postgres import postgres_programs
from tests.support.machines.machines import USER, WORK, Machine, MachineProcess
from tests.support.patience import allowed_s

__all__ = ["PORT", "start_postgres"]

PORT: Final = 5432
_START_S: Final = 60.0
_SETTINGS: Final = {
    "unix_socket_directories": "",
    "max_connections": "64",
    "autovacuum": "off",
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
}


def start_postgres(machine: Machine, network: str) -> tuple[MachineProcess, str]:
    """A server that lets everybody on `network` in, and the URL of its database. It ends with the machine. Root is
    refused by PostgreSQL, so it runs as the unprivileged user."""
    programs = postgres_programs()
    assert programs is not None, "no PostgreSQL on this machine; install the package postgresql"
    data = f"{WORK}/postgres"
    initdb = [f"{programs}/initdb", "-D", data, "-U", "fireflyer", "-A", "trust", "-E", "UTF8", "--locale=C"]
    machine.run([*initdb, "--no-sync"], user=USER, check=True)
    settings = {**_SETTINGS, "listen_addresses": machine.address, "port": str(PORT)}
    with open(machine.path(f"{data}/postgresql.conf"), "a") as file:
        file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
    with open(machine.path(f"{data}/pg_hba.conf"), "a") as file:
        file.write(f"host all all {network} trust\n")
    with open(machine.path(f"{WORK}/postgres.log"), "w") as log:
        server = machine.start([f"{programs}/postgres", "-D", data], user=USER, stdout=log, stderr=subprocess.STDOUT)
    deadline_s = time.monotonic() + allowed_s(_START_S)
    ready = [f"{programs}/pg_isready", "-q", "-h", machine.address, "-p", str(PORT)]
    while machine.run(ready).returncode != 0:
        said = machine.path(f"{WORK}/postgres.log").read_text()
        assert server.poll() is None, said
        assert time.monotonic() < deadline_s, said
        time.sleep(0.05)
    return server, f"postgresql://fireflyer@{machine.address}:{PORT}/postgres"
