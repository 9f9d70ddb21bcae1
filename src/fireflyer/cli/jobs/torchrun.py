"""torchrun's options for `ff run`: those that mean the same here, and one line for each that cannot be had.

Names may be written with dashes or underscores, as torchrun takes them. What a value says about the machine
(`--rdzv-endpoint localhost:0`) and is so anyway is accepted; what asks for something else is refused with what to do.

Reference: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.launch import STDERR, STDOUT
from fireflyer.cli.completion import complete_directory
from fireflyer.cli.numbers import WholeNumber

if TYPE_CHECKING:
    from fireflyer.cluster.schema.job import RankLine

__all__ = [
    "ONE_NODE",
    "NodeCount",
    "NodeRange",
    "RanksPerNode",
    "TorchrunOptions",
    "hidden_lines",
    "is_here",
    "read_options",
    "torchrun_options",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_RANKS = re.compile(r"[0-9]{1,5}(,[0-9]{1,5})*")
_STREAMS = re.compile(r"[0-3]|[0-9]{1,5}:[0-3](,[0-9]{1,5}:[0-3])*")
MAX_SHUTDOWN_S = 86_400

_REFUSED: Mapping[str, str] = {
    "rdzv-conf": "ranks meet through the launcher of ff run; --last-call is last_call_timeout, leave the rest out",
    "local-addr": "choose addresses with --interface NAME or --subnet 10.0.0.0/16, or leave it out",
    "event-log-handler": "events are in events.jsonl of the run directory; leave it out",
    "logs-specs": "logs of the ranks are in the run directory; --log-dir, --redirects and --tee choose others",
    "duplicate-stdout-filters": "leave it out, and search the log files of the ranks with grep",
    "duplicate-stderr-filters": "leave it out, and search the log files of the ranks with grep",
    "numa-binding": "ff run does not bind ranks to processors; use numactl with --no-python, or leave it out",
    "signals-to-handle": "SIGINT, SIGTERM and SIGHUP are passed on to the ranks, and no others; leave it out",
}
_REFUSED_FLAGS: Mapping[str, str] = {
    "run-path": "each rank is a Python process of its own; leave it out",
    "virtual-local-rank": "start a program with --no-python that sets CUDA_VISIBLE_DEVICES from LOCAL_RANK",
}
_IGNORED = ("monitor-interval", "start-method")
"""They say how torchrun does what is done here in another way, with the same result."""


_COUNT = WholeNumber(min=1)


class NodeCount(NamedTuple):
    """How many nodes a job may have."""

    most: int
    least: int
    """0: as many as `most`."""

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.least else str(self.most)


ONE_NODE = NodeCount(1, 0)


class NodeRange(click.ParamType[Any]):
    """A number, or `MIN:MAX`, as torchrun writes it."""

    name = "number or range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, NodeCount):
            return value
        least, colon, most = str(value).rpartition(":")
        if not colon:
            return NodeCount(_COUNT(value, param, ctx), 0)
        count = NodeCount(_COUNT(most, param, ctx), _COUNT(least, param, ctx))
        if count.least > count.most:
            raise UsageError(f"--nodes {value}: the first number, the least, must not be above the second")
        return count if count.least < count.most else NodeCount(count.most, 0)


class RanksPerNode(click.ParamType[Any]):
    """A number, or `auto`, `gpu`, `cpu`: one for each of what the machine has."""

    name = _COUNT.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in ("auto", "gpu", "cpu") else _COUNT(value, param, ctx)


class TorchrunOptions(msgspec.Struct, frozen=True):
    """`redirects` and `tee` are masks of streams for every local rank, `shown` the local ranks whose lines are shown
    (None: all)."""

    role: str
    log_dir: str
    redirects: tuple[int, ...]
    tee: tuple[int, ...]
    shown: frozenset[int] | None
    shutdown_s: int | None

    @property
    def files(self) -> tuple[int, ...]:
        """Which streams of each local rank have a file in `log_dir`."""
        if not self.log_dir:
            return ()
        return tuple(a | b for a, b in zip(self.redirects, self.tee, strict=True))


def torchrun_options(command: _F) -> _F:
    """Adds the options; the command gets their values as `**torchrun` for `read_options`."""
    for decorator in reversed((*_SHOWN, *_hidden())):
        command = decorator(command)
    return command


_SHOWN = (
    click.option(
        "--standalone", is_flag=True, help="Stay on this machine, in a Slurm allocation of several nodes too."
    ),
    click.option("--role", metavar="ROLE", default="default", show_default=True, help="ROLE_NAME of the ranks."),
    click.option(
        "--log-dir",
        metavar="DIR",
        default="",
        shell_complete=complete_directory,
        help="Write the streams named by --redirects and --tee to DIR/NAME_ID/attempt_0/LOCAL_RANK/stdout.log and "
        "stderr.log, too.  [default: only the logs in the run directory]",
    ),
    click.option(
        "-r",
        "--redirects",
        metavar="STREAMS",
        default="0",
        help="Do not show these streams: 1 stdout, 2 stderr, 3 both; 0:1,1:2 is stdout of local rank 0 and stderr of "
        "local rank 1. The log files have them.  [default: 0, show all]",
    ),
    click.option(
        "-t",
        "--tee",
        metavar="STREAMS",
        default="0",
        help="Show these streams and write them to --log-dir; written as for --redirects.  [default: 0]",
    ),
    click.option(
        "--local-ranks-filter",
        metavar="RANKS",
        default="",
        help="Show only what these local ranks print, as 0,1,2; the log files have all.  [default: all ranks]",
    ),
    click.option(
        "--shutdown-timeout",
        metavar="SECONDS",
        type=click.IntRange(0, MAX_SHUTDOWN_S),
        help="Between the signal that stops the ranks and SIGKILL.  [default: 10]",
    ),
)


def _hidden() -> list[Callable[[Any], Any]]:
    options = [click.option(f"--{name}", hidden=True, callback=_refuse(text)) for name, text in _REFUSED.items()]
    options += [
        click.option(f"--{name}", hidden=True, is_flag=True, callback=_refuse(text))
        for name, text in _REFUSED_FLAGS.items()
    ]
    options += [click.option(f"--{name}", hidden=True, expose_value=False) for name in _IGNORED]
    names = ("rdzv-backend", "master-addr")
    return options + [click.option(f"--{name}", hidden=True) for name in names]


def _refuse(text: str) -> Callable[[click.Context, click.Parameter, object], object]:
    def callback(_ctx: click.Context, param: click.Parameter, value: object) -> object:
        if value:
            shown = param.opts[0] if value is True else f"{param.opts[0]} {value}"
            raise UsageError(f"{shown}: {text}")
        return value

    return callback


def read_options(values: Mapping[str, Any], *, ranks_per_node: int) -> TorchrunOptions:
    """Raises `UsageError`."""
    _check_machines(values)
    redirects = _streams("--redirects", values["redirects"], ranks_per_node)
    tee = _streams("--tee", values["tee"], ranks_per_node)
    shown = None
    if text := values["local_ranks_filter"]:
        if not _RANKS.fullmatch(text):
            raise UsageError(f"--local-ranks-filter {text!r} is not understood; write local ranks like 0,1,2")
        shown = frozenset(map(int, text.split(",")))
    if not values["role"].isprintable() or not 0 < len(values["role"]) <= 200:
        raise UsageError(f"--role {values['role'][:40]!r} must have 1 to 200 printable characters")
    log_dir = os.path.abspath(values["log_dir"]) if values["log_dir"] else ""
    return TorchrunOptions(values["role"], log_dir, redirects, tee, shown, values["shutdown_timeout"])


def _check_machines(values: Mapping[str, Any]) -> None:
    backend, master = values["rdzv_backend"], values["master_addr"]
    if backend not in (None, "", "c10d", "static"):
        raise UsageError(f"--rdzv-backend {backend}: ranks meet through the launcher of ff run; leave it out")
    if master and not is_here(master):
        raise UsageError(f"--master-addr {master}: machines meet at --rdzv-endpoint {master}:29400; give that instead")


def is_here(host: str) -> bool:
    """Whether the name can only mean this machine."""
    return host.strip("[]") in ("", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())  # noqa: S104


def _streams(option: str, text: str, ranks_per_node: int) -> tuple[int, ...]:
    if not _STREAMS.fullmatch(text):
        raise UsageError(f"{option} {text!r} is not understood; write 0, 1 (stdout), 2 (stderr), 3 (both), or 0:1,1:2")
    if ":" not in text:
        return (int(text),) * ranks_per_node
    masks = [0] * ranks_per_node
    for part in text.split(","):
        rank, mask = map(int, part.split(":"))
        if rank >= ranks_per_node:
            raise UsageError(f"{option} {text}: there is no local rank {rank}; the last one is {ranks_per_node - 1}")
        masks[rank] = mask
    return tuple(masks)


def hidden_lines(options: TorchrunOptions) -> Callable[[RankLine], bool]:
    """Whether a line of a rank is not to be shown: filtered out, or redirected to its file alone."""

    def hidden(line: RankLine) -> bool:
        local = line.local_rank
        if options.shown is not None and local not in options.shown:
            return True
        stream = STDOUT if line.stream == "stdout" else STDERR
        return bool(options.redirects[local] & ~options.tee[local] & stream)

    return hidden
