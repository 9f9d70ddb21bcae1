"""Clients of a cluster on this machine, as `ff fs up --dir DIR` made it: DIR says where it is and who may come."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from typing import Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, NotFound, Timeout, UsageError
from fireflyer.base.units import SECOND
from fireflyer.fs.client.chunks import DEFAULT_TIMEOUT_NS, Chunks, Options, connect
from fireflyer.fs.client.ring import Ring, open_ring
from fireflyer.identity.handshake import Credential, NodeCredential
from fireflyer.identity.private_files import read_private_file
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.processes.run_lock import seems_held

__all__ = ["access_of", "connect_to", "open_ring_to", "running"]

_MAX_BYTES: Final = 64 << 20
_ENDED_NS: Final = 2 * SECOND
"""To answer, for a cluster that seems to have been ended: it may run under another machine's numbers of processes."""


class _Cluster(msgspec.Struct, frozen=True):
    """Of `cluster.json`, what a client needs."""

    managers: tuple[str, ...]


async def connect_to(directory: str, *, options: Options | None = None, timeout_ns: int = DEFAULT_TIMEOUT_NS) -> Chunks:
    """`connect`, to the cluster of `directory`, with the secret that lies there: all files may be touched."""
    managers, credential = access_of(directory)
    with running(directory, timeout_ns) as limit_ns:
        return await connect(managers, credential, options=options, timeout_ns=limit_ns)


def open_ring_to(directory: str, *, options: Options | None = None, timeout_ns: int = DEFAULT_TIMEOUT_NS) -> Ring:
    """`open_ring`, to the cluster of `directory`, with the secret that lies there."""
    managers, credential = access_of(directory)
    with running(directory, timeout_ns) as limit_ns:
        return open_ring(managers, credential, options=options, timeout_ns=limit_ns)


@contextlib.contextmanager
def running(directory: str | None, timeout_ns: int) -> Iterator[int]:
    """For how long to try. Raises `NotFound`, soon, for a cluster that does not run. None: it is elsewhere."""
    if directory is None or seems_held(os.path.join(directory, "up.lock")):
        yield timeout_ns
        return
    try:
        yield min(timeout_ns, _ENDED_NS)
    except Timeout as error:
        start = f"ff fs up --dir {shlex.quote(directory)} -d"
        raise NotFound(f"the cluster in {directory} is not running; start it: {start}") from error


def access_of(directory: str) -> tuple[tuple[str, ...], Credential]:
    """Managers, and the credential of a service. Raises `NotFound` where no cluster was made, `PermissionDenied` where
    its secret belongs to somebody else."""
    path = os.path.join(directory, "cluster.json")
    try:
        cluster = decode_json(read_private_file(path, _MAX_BYTES), _Cluster)
    except NotFound:
        raise NotFound(f"{directory} holds no cluster; make one: ff fs up --dir {shlex.quote(directory)}") from None
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{path} is damaged: {error}; restore it from a backup") from None
    if not cluster.managers or any(address.endswith(":0") for address in cluster.managers):
        raise UsageError(f"the cluster in {directory} has never run; start it: ff fs up --dir {shlex.quote(directory)}")
    secret = load_secret(os.path.join(directory, "node-secret"))
    return cluster.managers, NodeCredential(secret, f"client of user {os.getuid()}")
