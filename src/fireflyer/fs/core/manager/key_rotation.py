"""Changing the key that signs capabilities, while it is used: what the primary does about it, and when.

    (1)  ──RotateKeys──> (1, 2)  ──T──> (2, 1)  ──a capability's longest life──> (2)
                         2 is valid      2 signs                                  1 is not valid any more

The list is kept with the cluster's numbers; its first key signs, all in it are valid. Storage processes are told of it
in the answers to their heartbeats, and heed the latest.

*Why no node meets a capability whose key it does not know.* The new key signs T after it was committed. Whose fence is
open then has an answer to a heartbeat that it sent after the commit: a fence lasts T/2. Who has none refuses everybody,
whatever they present. *Why no capability is worthless before its time.* The old key is valid for the longest life of a
capability after it has signed the last one.

How long a step has lasted is in memory: a new primary waits for all of it again. Each step is a transaction of its own,
so the list says how far it is.

A key that somebody has got is *revoked* instead: the new one is valid alone and signs at once. Storage processes close
connections on which its capabilities count, and refuse what the new one signs until their next heartbeat is answered:
clients ask again.
"""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.fs.core.manager.ledger import Ledger
from fireflyer.fs.schema.manager import Done, RotateKeys

__all__ = ["MAX_KEY_ID", "KeyRotation", "rotate"]

MAX_KEY_ID: Final = (1 << 32) - 1
KeyIds = tuple[int, ...]


def rotate(request: RotateKeys, ledger: Ledger) -> Done:
    """Into the draft. Raises `UsageError` when there are no numbers left."""
    keys = ledger.key_ids
    newest = max(keys) + 1
    if newest > MAX_KEY_ID:
        raise UsageError("all key numbers are used; replace the node secret of the cluster")
    if request.revoke:
        ledger.put_keys((newest,))
        return Done(f"key {newest} signs from now on; all capabilities signed with other keys are invalid")
    if len(keys) > 1:
        return Done(f"a key rotation is running already: {_shown(keys)}; wait until it is done")
    ledger.put_keys((*keys, newest))
    return Done(
        f"key {newest} signs as soon as all storage processes have it; key {keys[0]} stays valid until its "
        "capabilities expire"
    )


class KeyRotation:
    """The primary's. `committed` after each commit, `advance` into a draft when `due`."""

    def __init__(self, ledger: Ledger, *, told_ns: int, life_ns: int, now_ns: int) -> None:
        """`told_ns`: T. `life_ns`: of a capability, at most."""
        self._ledger = ledger
        self._told_ns, self._life_ns = told_ns, life_ns
        self._keys, self._since_ns = ledger.state.key_ids, now_ns

    def committed(self, now_ns: int) -> None:
        if self._ledger.state.key_ids != self._keys:
            self._keys, self._since_ns = self._ledger.state.key_ids, now_ns

    def restart_clocks(self, slept_ns: int) -> None:
        """The manager's process stood still for so long: who could not ask was not told."""
        self._since_ns += slept_ns

    def due(self, now_ns: int) -> bool:
        if len(self._keys) < 2:
            return False
        return now_ns - self._since_ns >= (self._told_ns if _waits(self._keys) else self._life_ns)

    def advance(self) -> list[str]:
        """The next step, if nobody else has changed the list in this draft; what it did, for the log."""
        if self._ledger.key_ids != self._keys:
            return []
        newest = max(self._keys)
        following = (newest, *(one for one in self._keys if one != newest)) if _waits(self._keys) else (newest,)
        self._ledger.put_keys(following)
        return [f"keys of capabilities: {_shown(self._keys)} -> {_shown(following)}"]


def _waits(keys: KeyIds) -> bool:
    """The newest one does not sign yet."""
    return keys[0] != max(keys)


def _shown(keys: KeyIds) -> str:
    others = f", valid {', '.join(map(str, keys[1:]))}" if len(keys) > 1 else ""
    return f"{keys[0]} signs{others}"
