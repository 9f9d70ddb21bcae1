"""Machines that a job runs on: how they are named, what each is asked before a start, and what it is told."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.port_range import PortRange
from fireflyer.cluster.schema.addresses import MAX_NETWORKS, AddressChoice, is_link_local
from fireflyer.cluster.schema.job import MAX_NODES
from fireflyer.cluster.schema.wire import SupervisorConfig
from fireflyer.runtime.processes.guard_command import MAX_ORDERS_BYTES

__all__ = [
    "FACTS_MARK",
    "MAX_ORDERS_BYTES",
    "Host",
    "HostFacts",
    "HostNetwork",
    "HostQuestion",
    "NodeOrders",
    "expand_counts",
    "expand_nodelist",
    "parse_hosts",
]

FACTS_MARK: Final = "FIREFLYER-HOST "
"""Begins the line of the answer: a shell may print other lines before it."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,252}|\[[0-9a-fA-F:.]{2,45}\]")
_COUNT = re.compile(r"([1-9][0-9]{0,3})(?:\(x([1-9][0-9]{0,5})\))?")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")

_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Address = Annotated[str, msgspec.Meta(max_length=45, pattern=r"^[0-9a-fA-F:.]*$")]
_Interface = Annotated[str, msgspec.Meta(max_length=15, pattern=r"^[^\s/]*$")]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Uid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Host(msgspec.Struct, frozen=True):
    """`slots`: how many ranks it takes; None: as many as the job puts on a node."""

    name: str
    slots: int | None = None


class HostQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is asked before a start, as one line of JSON."""

    workdir: _Text
    script: _Text
    kind: _Text
    run_dir: _Text
    mark: _Text
    """Name of a file that the launcher made in the run directory: who finds it shares the directory."""
    stream_dir: _Text = ""
    """Another directory in which it made that file, of --log-dir; empty: none."""
    addresses: AddressChoice = AddressChoice()
    ports: PortRange | None = None
    ports_needed: _Count = 0
    """It counts free ports of the range up to this number."""
    master_port: _Port = 0
    """0: any."""
    control_port: _Port = 0
    """Of the launcher; 0: whether it is reached is not asked."""
    control_address: _Text = ""
    """Empty: that from which the question came."""


class HostNetwork(msgspec.Struct, frozen=True):
    """An address of a machine, and which of its interfaces has it."""

    interface: _Interface
    address: _Address


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Checked as a stranger's: the machine may run another release, or lie."""

    version: _Text
    python: _Text
    hostname: _Text
    boot_id: _Text
    namespace: _Text
    """Of its network: machines that are containers have one kernel and several of these."""
    uid: _Uid
    cores: _Count
    gpus: _Count
    has_workdir: bool
    script_sha256: _Text
    """Empty: there is none that could be read. Of a module: its file; of a program: nothing is compared."""
    has_script: bool
    shares_run_dir: bool
    """And the directory of --log-dir."""
    client: _Text
    """Address of the launcher's machine as this one sees it; empty where ssh did not tell."""
    server: _Text
    """Address of this machine, as the launcher reached it."""
    time_ns: int
    """Wall clock, nanoseconds since the epoch."""
    address: _Address = ""
    """Its own that was asked for; empty: none was, or it has none."""
    interface: _Interface = ""
    """Which has that address."""
    no_address: _Text = ""
    """Why it has none."""
    more_networks: Annotated[tuple[HostNetwork, ...], msgspec.Meta(max_length=MAX_NETWORKS - 1)] = ()
    """Where several were asked for: the others."""
    free_ports: _Count = 0
    """Of the range, at most as many as are needed."""
    master_port_taken: bool = False
    launcher_not_reached: _Text = ""
    """The address that was tried, and why; empty: it was reached, or that was not asked."""


class NodeOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What starts a node's guard on another machine, as one line of JSON on its standard input."""

    config: SupervisorConfig
    secret: bytes
    """Of the job; empty where the file in the run directory is there already."""
    directory: _Text
    """For the files of this job on that machine; made, and private, if it is not there."""
    workdir: _Text
    token: _Text
    environment: dict[str, str] = {}
    first_lease_ns: int = 0
    user_token: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Of the user of a run of the platform, for a file in `directory`; empty: none, or the path of the launcher's file
    is in the environment."""


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`a,b:8,[fd00::1]:4`: names or addresses, each perhaps with its number of ranks. The brackets, which ssh does not
    take, are not part of the name. Raises `UsageError`."""
    hosts = []
    for part in text.split(","):
        bracket = part.rfind("]")
        at = part.rfind(":")
        name, slots = (part[:at], part[at + 1 :]) if at > bracket else (part, None)
        if is_link_local(name):
            raise UsageError(
                f"--hosts {part[:80]} is a link-local address, which other hosts cannot use; write a global or unique "
                "local address (fd00::/8), or a name that has one"
            )
        if not _NAME.fullmatch(name) or (slots is not None and not (slots.isdecimal() and 0 < int(slots[:6]) <= 4096)):
            raise UsageError(
                f"--hosts {text[:200]!r}: {part[:80]!r} is not understood; write names or addresses separated by "
                "commas, each perhaps with its number of ranks: a,b:8,10.0.0.3,[fd00::1]:8"
            )
        hosts.append(Host(name.strip("[]"), None if slots is None else int(slots)))
    names = [host.name for host in hosts]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"--hosts names {doubled[0]} twice; give its number of ranks after a colon ({doubled[0]}:8)")
    if len(hosts) > MAX_NODES:
        raise UsageError(f"--hosts has {len(hosts)} hosts, and a job has at most {MAX_NODES} nodes; give fewer")
    return tuple(hosts)


def expand_nodelist(text: str) -> tuple[str, ...]:
    """The names in a list as Slurm writes it (SLURM_JOB_NODELIST). Raises `UsageError`.

    >>> expand_nodelist("n[01-03,7],gpu-a")
    ('n01', 'n02', 'n03', 'n7', 'gpu-a')
    """
    names: list[str] = []
    for part in _parts(text):
        names += _expand(part, text)
        if len(names) > MAX_NODES:
            raise UsageError(f"the node list {text[:80]!r} has more than {MAX_NODES} nodes; use a part of it: --hosts")
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers in a list as Slurm writes it (SLURM_TASKS_PER_NODE), one for each node. Raises `UsageError`.

    >>> expand_counts("8(x3),4")
    (8, 8, 8, 4)
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise UsageError(f"the counts {text[:80]!r} of Slurm are not understood; give --ranks-per-node N")
        times = int(match[2] or 1)
        if len(counts) + times > MAX_NODES:
            raise UsageError(f"the counts {text[:80]!r} of Slurm are for more than {MAX_NODES} nodes; name --hosts")
        counts += [int(match[1])] * times
    return tuple(counts)


def _parts(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _not_understood(text)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth or not all(parts):
        raise _not_understood(text)
    return parts


def _expand(part: str, text: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, after = rest.partition("]")
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _not_understood(text)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_NODES or len(numbers) > MAX_NODES:
            raise _not_understood(text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [before + number + tail for number in numbers for tail in _expand(after, text)] if after else [
        before + number for number in numbers
    ]  # fmt: skip


def _not_understood(text: str) -> UsageError:
    return UsageError(f"the node list {text[:80]!r} is not understood; write it like n[01-08,12],login, or use --hosts")
