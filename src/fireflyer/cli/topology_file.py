"""Reads the file that `--topology` names: TOML, as `fireflyer.collectives.declaration` describes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from fireflyer.base.errors import UsageError

if TYPE_CHECKING:
    from fireflyer.collectives.declaration import Declaration

__all__ = ["read_topology", "topology_json"]

MAX_BYTES: Final = 16 << 20


def read_topology(path: str) -> Declaration:
    """Raises `UsageError`: one line that names the file and what is wrong in it."""
    import msgspec

    from fireflyer.collectives.declaration import Declaration

    try:
        if not os.path.isfile(path):  # a pipe would wait, a device never end
            raise UsageError(f"--topology {path!r} is no file; give a TOML file, see docs/how-to/tune-collectives.md")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--topology {path!r} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"--topology {path!r} is larger than {MAX_BYTES} bytes")
    try:
        return msgspec.toml.decode(data, type=Declaration)
    except (msgspec.MsgspecError, UsageError, UnicodeDecodeError) as error:
        raise UsageError(f"--topology {path!r}: {error}; its keys: docs/how-to/tune-collectives.md") from error


def topology_json(path: str, *, nodes: int) -> bytes:
    """The same for a job of so many nodes, as the ranks read it. Raises `UsageError`."""
    import msgspec

    declaration = read_topology(path)
    if declaration.zones and len(declaration.zones) != nodes:
        raise UsageError(f"--topology {path!r}: zones names {len(declaration.zones)} nodes, and --nodes is {nodes}")
    return msgspec.json.encode(declaration)
