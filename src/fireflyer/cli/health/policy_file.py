"""The file with the policy of health checks, read again when it changes."""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.cli.toml_files import read_toml
from fireflyer.runtime.file_mark import file_mark
from fireflyer.validators.core.checks.policy import HealthPolicy

__all__ = ["PolicyFile", "read_policy"]

_ADVICE: Final = "give a TOML file, or none for the defaults"


def read_policy(path: str | None) -> HealthPolicy:
    """The defaults where there is no path. Raises `UsageError`: one line."""
    if path is None:
        return HealthPolicy()
    return read_toml(path, HealthPolicy, name="health policy", advice=_ADVICE, keys="docs/how-to/health-checks.md")


class PolicyFile:
    """The policy that is in force: the newest that could be read."""

    def __init__(self, path: str | None) -> None:
        """Raises `UsageError`."""
        self._path = path
        self._mark = self._newest()
        self._policy = read_policy(path)

    def current(self) -> tuple[HealthPolicy, str]:
        """And, while the file is not to be used as it is now, why not."""
        mark = self._newest()
        if mark != self._mark:
            try:
                self._policy = read_policy(self._path)
            except UsageError as error:
                return self._policy, f"{error}; the policy from before is in force"
            self._mark = mark
        return self._policy, ""

    def _newest(self) -> tuple[int, ...]:
        return () if self._path is None else file_mark(self._path)
