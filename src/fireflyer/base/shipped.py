"""Files that the package ships beside its code, by name. Pure: they are the same wherever a release is installed."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from fireflyer.base.errors import UsageError

__all__ = ["ShippedFiles"]


class ShippedFiles(NamedTuple):
    """Files of one kind in a directory of a package."""

    package: str
    directory: str
    suffix: str
    """Of all of them, as in `.toml`; their names here are without it."""
    what: str
    """What one of them describes, as errors call it: `network`."""

    def names(self) -> tuple[str, ...]:
        """Names in alphabetical order."""
        found = (one.name for one in files(self.package).joinpath(self.directory).iterdir())
        return tuple(sorted(name.removesuffix(self.suffix) for name in found if name.endswith(self.suffix)))

    def read(self, name: str) -> bytes:
        """Content of the file of that name. Raises `UsageError` with the names that there are."""
        known = self.names()
        if name not in known:
            raise UsageError(f"no {self.what} {name!r} is shipped; use {', '.join(known)}")
        return files(self.package).joinpath(self.directory, f"{name}{self.suffix}").read_bytes()
