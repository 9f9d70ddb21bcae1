"""One pack at a time in a directory: by a lock, and by the owner in the state file where that does not help.

A lock keeps others out for as long as its holder lives. Some file systems have none, and a client of 3FS that was away
for a minute has lost its own. Then two packers may both be at work, and the state file decides, whose owner each of
them draws:

    who takes over                          who is taken over from, for each file
    1. writes the state with its owner      1. makes it under a temporary name that nobody else has
    2. removes all temporary files          2. looks whether the state has its owner still
    3. looks whether the state has its      3. gives it its name
       owner still, and whether there is
       a manifest
    4. removes shards that do not count

Where 2 on the right finds its owner, the temporary file was there before 2 on the left began. So it is removed there,
and cannot be renamed any more; or it was renamed before, and is met in 3 or 4. No shard that a manifest lists is
removed, and no state that counts shards is replaced by an older one without one of the two noticing.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import uuid
from collections.abc import Iterator
from typing import Final

from fireflyer.base.errors import Busy, Exists, Fenced, FireflyerError, NotFound
from fireflyer.base.ports import Disk, Held
from fireflyer.data.manifest import MANIFEST_NAME, is_shard_file, names_file, shard_file
from fireflyer.data.packing.state_file import STATE_NAME, State, load_state, save_state

__all__ = ["LOCK_NAME", "Claim", "alone"]

LOCK_NAME: Final = ".packing.lock"
_TEMPORARY: Final = re.compile(r"\.(shard-\d{5}\.ffr|names-\d{5}\.ffr|dataset\.json|\.packing\.json)\.tmp-[0-9a-f]+")


@contextlib.contextmanager
def alone(disk: Disk, directory: str, shown: str) -> Iterator[None]:
    """Holds the lock of the directory, where it can have one. Raises `Busy` where another pack is running."""
    try:
        lock = disk.hold(posixpath.join(directory, LOCK_NAME))
    except Held:
        raise Busy(
            f"{shown}: another pack into this directory is running; wait until it has ended, or choose another "
            "directory"
        ) from None
    try:
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(FireflyerError):  # it is lost with the process, or with the session on 3FS
                lock.release()


class Claim:
    """What one packer does with the names in its directory, and what it leaves to another that has taken it over."""

    def __init__(self, disk: Disk, directory: str, shown: str) -> None:
        self.owner = uuid.uuid4().hex
        self._disk, self._directory, self.shown = disk, directory, shown

    def has_state(self) -> bool:
        return self._disk.exists(self._at(STATE_NAME))

    def load(self) -> State | None:
        """As `load_state`."""
        return load_state(self._disk, self._at(STATE_NAME), f"{self.shown}/{STATE_NAME}")

    def require_no_shards(self) -> None:
        """Raises `Exists` where shards lie here that no state counts."""
        for name in self._disk.list(self._directory):
            if is_shard_file(name):
                raise Exists(f"{self.shown} holds {name}, which is of no data set; choose an empty directory")

    def take_over(self, state: State) -> None:
        """Begins at `state`, whose owner is ours, and removes what it does not count. Raises `Fenced`, and `Exists`
        where the packer before it came to its end meanwhile."""
        save_state(self._disk, self._at(STATE_NAME), state)
        for name in self._disk.list(self._directory):
            if _TEMPORARY.fullmatch(name):
                self._remove(name)
        self.require_mine()
        self.refuse_finished()
        kept = {name(number) for number in range(state.shards) for name in (shard_file, names_file)}
        for name in self._disk.list(self._directory):
            if is_shard_file(name) and name not in kept:
                self._remove(name)

    def refuse_finished(self) -> None:
        """Raises `Exists` where the directory holds a data set."""
        if MANIFEST_NAME in self._disk.list(self._directory):
            self.remove_state()  # of a packer that ended just after the manifest
            raise Exists(f"{self.shown} holds a data set already; choose another directory")

    def require_mine(self) -> None:
        """Raises `Fenced`."""
        state = self.load()
        if state is None or state.owner != self.owner:
            raise Fenced(f"{self.shown}: another pack into this directory has begun; this one ends")

    def save(self, state: State) -> None:
        """Raises `Fenced`."""
        save_state(self._disk, self._at(STATE_NAME), state, self.require_mine)

    def remove_state(self) -> None:
        self._remove(STATE_NAME)

    def forget(self) -> None:
        """Nothing was packed, so that there is nothing to go on with: a command that was wrong is corrected."""
        with contextlib.suppress(FireflyerError):
            self.require_mine()
            self.remove_state()

    def _remove(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            self._disk.remove(self._at(name))

    def _at(self, name: str) -> str:
        return posixpath.join(self._directory, name)
