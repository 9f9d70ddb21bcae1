"""Whose fault it is that an environment could not be built, and how that is said in one line. Pure.

The tools that build (pip, uv) have exit codes for neither, so it is told by what they print. What only a node or its
network can be the reason of is looked for first: pip that cannot reach its index says so in warnings, and at its end
that there is no such package. Everything else is the lock file's: a wrong hash, a package that does not exist, one that
does not compile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["BuildFailure", "build_failure"]

MAX_SHOWN: Final = 600
"""Characters of what the tool said."""
NOT_STARTED: Final = (126, 127)
"""No such program, or one that the account may not execute."""
_NODE: Final = re.compile(
    r"no space left on device|disk quota exceeded|read-only file system|input/output error|too many open files|"
    r"cannot allocate memory|memoryerror|\[errno (?:5|12|23|24|28|30|122)\]|"
    r"temporary failure in name resolution|name or service not known|failed to resolve|nameresolutionerror|"
    r"failed to lookup address|dns error|newconnectionerror|connection refused|connection reset|connection aborted|"
    r"connection broken|network is unreachable|no route to host|remotedisconnected|read timed out|readtimeouterror|"
    r"connecttimeouterror|connection to \S+ timed out|operation timed out|max retries exceeded|"
    r"http error 5\d\d|http error 429|\b(?:50[0-4]|429) (?:server|client) error|too many 5\d\d error|"
    r"certificate.verify.failed|invalid peer certificate|sslerror|proxyerror|cannot connect to proxy|"
    r"incompleteread|protocolerror|ensurepip is not available",
    re.IGNORECASE,
)
_ERROR: Final = re.compile(r"^(?:\W*)error\b", re.IGNORECASE)


class BuildFailure(NamedTuple):
    of_user: bool
    """False: on another node it may go well."""
    text: str


def build_failure(kind: str, code: int, lines: Sequence[str]) -> BuildFailure:
    """`kind`: of the lock file. `code`: of the tool, negative for a signal. `lines`: the last ones that it printed."""
    of_node = next((line for line in lines if _NODE.search(line)), None)
    if of_node is not None:
        return _failure(kind, f"exit code {code}", [of_node], of_user=False)
    if code < 0:
        return _failure(kind, f"killed by signal {-code}", _telling(lines), of_user=False)
    return _failure(kind, f"exit code {code}", _telling(lines), of_user=code not in NOT_STARTED)


def _telling(lines: Sequence[str]) -> Sequence[str]:
    """From the first error on; all where the tool names none."""
    first = next((at for at, line in enumerate(lines) if _ERROR.match(line)), 0)
    return lines[first:]


def _failure(kind: str, how: str, lines: Sequence[str], *, of_user: bool) -> BuildFailure:
    said = " | ".join(lines)
    if len(said) > MAX_SHOWN:
        said = f"{said[: MAX_SHOWN // 2]} … {said[-MAX_SHOWN // 2 :]}"
    return BuildFailure(of_user, f"the environment of {kind} could not be built ({how}): {said or 'it said nothing'}")
