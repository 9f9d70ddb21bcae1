"""`ff://…`: which cluster, and which path in it. Pure.

| written | cluster | path |
|---|---|---|
| `ff://host:7000,other:7000/data/x` | managers at these addresses | `/data/x` |
| `ff://%2Fhome%2Fann%2Ffs/data/x` | of `ff fs up --dir /home/ann/fs`, percent-encoded as libpq does | `/data/x` |
| `ff:///data/x`, `ff://data/x` | the one that options name, else the default one | `/data/x` |

What stands before the first slash names a cluster only with a port, or percent-encoded. `default_cluster` says which
one is the default.
"""

from __future__ import annotations

import posixpath
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["SCHEME", "Address", "clean_path", "parse_address"]

SCHEME: Final = "ff://"


class Address(msgspec.Struct, frozen=True):
    managers: tuple[str, ...] = ()
    """HOST:PORT each."""
    directory: str = ""
    """Of a local cluster. Both empty: the URL does not say."""
    path: str = "/"

    @property
    def target(self) -> str:
        """As `fireflyer.fs.connect` wants it; empty when the URL does not say."""
        if self.directory:
            return SCHEME + self.directory
        return SCHEME + ",".join(self.managers) if self.managers else ""

    @property
    def prefix(self) -> str:
        """What stands before the path in a URL of this cluster."""
        return SCHEME + (quote(self.directory, safe="") if self.directory else ",".join(self.managers))


def clean_path(path: str) -> str:
    """Absolute, with one slash between names and none at the end; "." and ".." are left to the file system, which
    knows where symbolic links lead."""
    names = [name for name in path.split("/") if name]
    return "/" + "/".join(names)


def parse_address(url: str) -> Address:
    """Raises `UsageError`. The path is kept as it is written, since "#", "?" and "%" may be in names."""
    if not url.startswith(SCHEME):
        raise UsageError(f"{url!r} is not an address of files; write it like ff://host:7000/path or ff:///path")
    netloc, slash, rest = url[len(SCHEME) :].partition("/")
    path = slash + rest or "/"
    if "%" not in netloc and ":" not in netloc:
        return Address(path=f"/{netloc}{slash}{rest}" if netloc else path)
    if "%" in netloc:
        directory = unquote(netloc)
        if not posixpath.isabs(directory):
            raise UsageError(f"{url!r} names a relative directory; write it like ff://%2Fhome%2Fann%2Ffs/")
        return Address(directory=directory, path=path)
    managers = tuple(netloc.split(","))
    for one in managers:
        host, colon, port = one.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(
                f"{one!r} in {url!r} is not HOST:PORT; write ff://HOST:7000/path, or ff:///path in the default cluster"
            )
    return Address(managers=managers, path=path)
