"""Reads the file that `--topology` names: TOML, as `fireflyer.collectives.planning.declaration` describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fireflyer.base.errors import UsageError

if TYPE_CHECKING:
    from fireflyer.collectives.planning.declaration import Declaration

__all__ = ["read_topology", "topology_json"]

MAX_BYTES: Final = 16 << 20


def read_topology(path: str) -> Declaration:
    """Raises `UsageError`: one line that names the file and what is wrong in it."""
    from fireflyer.cli.toml_files import read_toml
    from fireflyer.collectives.planning.declaration import Declaration

    manual = "docs/how-to/tune-collectives.md"
    return read_toml(
        path,
        Declaration,
        name="--topology",
        advice=f"give a TOML file, see {manual}",
        keys=manual,
        max_bytes=MAX_BYTES,
    )


def topology_json(path: str, *, nodes: int) -> bytes:
    """The same for a job of so many nodes, as the ranks read it. Raises `UsageError`."""
    import msgspec

    declaration = read_topology(path)
    if declaration.zones and len(declaration.zones) != nodes:
        raise UsageError(f"--topology {path!r}: zones has {len(declaration.zones)} entries, --nodes is {nodes}")
    return msgspec.json.encode(declaration)
