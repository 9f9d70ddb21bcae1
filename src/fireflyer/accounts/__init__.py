"""The users of a cluster in the key-value store, so that the file system and the platform have the same ones."""

from __future__ import annotations

from fireflyer.accounts.store import AccountStore

__all__ = ["AccountStore"]
