"""How a guard is started (see `fireflyer.runtime.processes.guard`): for programs that become one, without asyncio."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

from fireflyer.runtime.processes import guard

__all__ = ["MAX_ORDERS_BYTES", "PYTHON", "GuardCommand"]

PYTHON: Final = (sys.executable, "-I", "-S")
"""For programs that need the standard library alone."""
MAX_ORDERS_BYTES: Final = 32 << 10
"""Less than a pipe takes at once, and more than a guard is ever told."""


class GuardCommand(NamedTuple):
    """How a guard is started. `orders`: what it reads first. One that is `remote` runs on another machine: that it says
    `clean` is the only proof that nothing is left there."""

    argv: tuple[str, ...]
    orders: bytes = b""
    remote: bool = False

    @classmethod
    def here(
        cls, command: Sequence[str], *, lease_s: float = 0, first_lease_s: float = 0, detached: bool = False,
        until: str = "", forward: bool = False,
    ) -> GuardCommand:  # fmt: skip
        """A guard of `command` on this machine. `detached`: one that nobody owns; it ends by its lease or SIGTERM, or
        when the time in the file `until` is over. `forward`: its command gets SIGUSR1, and SIGUSR2 as SIGTERM."""
        options = (f"--lease={lease_s:g}", f"--first-lease={first_lease_s or lease_s:g}") if lease_s else ()
        alone = ("--detached",) if detached else ()
        limit = (f"--until={until}",) if until else ()
        signals = ("--forward",) if forward else ()
        return cls((*PYTHON, guard.__file__, *options, *alone, *limit, *signals, *command))
