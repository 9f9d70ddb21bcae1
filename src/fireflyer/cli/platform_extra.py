"""The extra `fireflyer[platform]`, which nodes that only run agents do not have."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from fireflyer.base.errors import UsageError

__all__ = ["explained", "need_platform_extra"]

_MODULES: Final = ("alembic", "cryptography", "h11", "litestar", "pathspec", "sqlalchemy", "uvicorn", "wsproto")
"""That are there if it is installed."""


def need_platform_extra() -> None:
    """Raises `UsageError` where one of its packages is not installed: before anything is made, and without importing
    them, which takes a second."""
    for name in _MODULES:
        if find_spec(name) is None:
            raise _missing(name)


def explained(error: Exception) -> Exception:
    """What a package that is not installed means to who has called the command; any other error as it is."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    return _missing(name) if name in _MODULES else error


def _missing(name: str) -> UsageError:
    return UsageError(f"{name} is not installed; run: pip install 'fireflyer[platform]'")
