"""The users of a cluster: in the key-value store, so that the file system and the platform have the same ones, and how
services find whose token it is.

Names are imported when they are first used: a process that asks others for users needs no store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.accounts.store import AccountStore

__all__ = ["AccountStore"]


def __getattr__(name: str) -> Any:
    if name == "AccountStore":
        from fireflyer.accounts.store import AccountStore

        return AccountStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
