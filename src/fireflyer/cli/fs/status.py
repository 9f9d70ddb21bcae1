"""`ff fs status`: nodes, targets, chains, space, and how far recovery is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click
import msgspec

from fireflyer.cli.fs.connect import ClusterTarget, ask_all, expect, where_options

if TYPE_CHECKING:
    from fireflyer.fs.schema.manager import FilesStatus, MoveStatus, Status, TargetReport, TargetStatus
    from fireflyer.fs.schema.routing import Chain

__all__ = ["Summary", "at_least", "look", "shown", "status_command", "status_lines", "summary_of", "to_json"]

TROUBLE_SHOWN: Final = 20


class Summary(msgspec.Struct, frozen=True):
    nodes: int
    alive: int
    chains: int
    whole: int
    """Chains of which every target serves."""
    readable: int
    """Chains that somebody serves."""
    syncing: int
    used_bytes: int
    """On disks: every replica counts."""
    capacity_bytes: int
    sessions: int


def summary_of(status: Status) -> Summary:
    from fireflyer.fs.core.manager.disk_space import space_of
    from fireflyer.fs.schema.routing import TargetState

    states = [[member.state for member in chain.members] for chain in status.chains]
    used_bytes, capacity_bytes = space_of(status, [node.id for node in status.nodes])
    return Summary(
        nodes=len(status.nodes),
        alive=sum(node.alive for node in status.nodes),
        chains=len(states),
        whole=sum(all(state is TargetState.SERVING for state in chain) for chain in states),
        readable=sum(TargetState.SERVING in chain for chain in states),
        syncing=sum(TargetState.SYNCING in chain for chain in states),
        used_bytes=used_bytes,
        capacity_bytes=capacity_bytes,
        sessions=status.sessions,
    )


def look(where: ClusterTarget) -> tuple[Status, tuple[MoveStatus, ...], FilesStatus]:
    """What a cluster says of itself now. Raises `FireflyerError`."""
    from fireflyer.fs.schema.manager import FilesStatus, GetFilesStatus, GetMoves, GetStatus, MoveList, Status

    answers = ask_all(where, [GetStatus(), GetMoves(), GetFilesStatus()])
    return expect(answers[0], Status), expect(answers[1], MoveList).moves, expect(answers[2], FilesStatus)


@click.command(
    "status", short_help="Show nodes, chains, space, recovery and files.", epilog="Example: ff fs status --dir fs"
)
@where_options
@click.option(
    "--all", "show_all", is_flag=True, help="Show every chain.  [default: chains that are not fully replicated]"
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def status_command(*, where: ClusterTarget, show_all: bool, as_json: bool) -> int:
    """Show the state of a cluster: which nodes are alive, which chains are not fully replicated and how far they are
    synced, the space used on disks, and the number of files.

    "Sessions" counts connected clients; each meta service is one of them. A removed file is "not collected yet" until
    its chunks are deleted."""
    status, moves, files = look(where)
    if as_json:
        click.echo(to_json(status, moves, files).decode())
        return 0
    from fireflyer.cli.output import stdout_console

    console = stdout_console()
    for line in status_lines(status, files, show_all=show_all):
        console.print(line, soft_wrap=True)
    if moves:
        from fireflyer.base.units import counted

        begun = sum(move.target > 0 for move in moves)
        console.print(
            f"  rebalance: {counted(len(moves), 'chain')} to move to other nodes, {begun} being copied now",
            soft_wrap=True,
        )
    return 0


def shown(status: Status, moves: Sequence[MoveStatus], files: FilesStatus) -> dict[str, object]:
    """What `ff fs status --json` prints, as `ff status --json` does below `storage`."""
    return {"summary": summary_of(status), "status": status, "moves": moves, "files": files}


def to_json(status: Status, moves: Sequence[MoveStatus], files: FilesStatus) -> bytes:
    """Of `ff fs status --json`."""
    return msgspec.json.encode(shown(status, moves, files))


def status_lines(status: Status, files: FilesStatus, *, show_all: bool = False) -> list[str]:
    """What `ff fs status` prints. `show_all`: chains that are whole, too."""
    return [*_lines(status, show_all=show_all), *_files(files)]


def _lines(status: Status, *, show_all: bool) -> list[str]:
    from fireflyer.base.units import counted, format_bytes

    found = summary_of(status)
    space = "space not reported yet"
    if found.capacity_bytes:
        space = f"{format_bytes(found.used_bytes)} of {format_bytes(found.capacity_bytes)} used on disks"
    lines = [
        f"Cluster {status.cluster or '(unnamed)'}: {found.alive} of {found.nodes} nodes alive, {found.whole} of "
        f"{found.chains} chains fully replicated, {found.readable} available, {found.syncing} syncing; {space}; "
        f"{counted(found.sessions, 'session')}."
    ]
    lines += _nodes(status)
    shown = status.chains if show_all else [one for one in status.chains if not _whole(one)]
    reports = {one.id: one.report for one in status.targets}
    unwanted = {one.id: "drained" if one.drained else "draining" for one in status.targets if one.unwanted}
    for chain in shown[: None if show_all else TROUBLE_SHOWN]:
        lines.append(_chain(chain, reports, unwanted))
    if not show_all and len(shown) > TROUBLE_SHOWN:
        more = counted(len(shown) - TROUBLE_SHOWN, "more chain")
        lines.append(f"… and {more} not fully replicated; --all shows them")
    spare = [one for one in status.targets if one.chain is None]
    if spare:
        lines.append(f"{counted(len(spare), 'target')} in no chain: {_first(spare)}")
    return lines


def _files(files: FilesStatus) -> list[str]:
    from fireflyer.base.units import SECOND, counted, format_bytes, format_duration

    least = "" if files.all_inodes else "over "
    age = f" ({format_duration(files.inodes_age_ns)} ago)" if files.inodes_age_ns >= 10 * SECOND else ""
    line = (
        f"Files: {least}{counted(files.inodes, 'inode')}{age}, {at_least(files.writing)} open for writing, "
        f"{counted(files.services, 'meta service')}"
    )
    if files.unlinked:
        line += f"; {at_least(files.unlinked)} removed and not collected yet ({format_bytes(files.unlinked_bytes)})"
    return [f"{line}.", *([f"  garbage collection fails: {files.last_error}"] if files.last_error else [])]


def at_least(count: int) -> str:
    """Of what is counted only so far."""
    from fireflyer.fs.schema.manager import COUNTED

    return f"at least {count}" if count >= COUNTED else str(count)


def _first(targets: list[TargetStatus]) -> str:
    more = ", …" if len(targets) > TROUBLE_SHOWN else ""
    return ", ".join(str(one.id) for one in targets[:TROUBLE_SHOWN]) + more


def _nodes(status: Status) -> list[str]:
    from fireflyer.base.units import counted, format_bytes, format_duration
    from fireflyer.fs.core.manager.disk_space import space_of

    lines = []
    for node in status.nodes:
        own = [one for one in status.targets if one.node == node.id]
        used, capacity = space_of(status, [node.id])
        counts = {"drained": sum(one.drained for one in own), "draining": sum(one.leaving for one in own)}
        if node.alive:
            how = "alive"
        elif node.incarnation and not node.heard:
            how = "no heartbeat yet"
        elif node.incarnation:
            how = f"dead, silent {format_duration(node.silent_ns)}"
        else:
            how = "never registered"
        line = f"  node {node.id:<4} {how:<22} {node.address or '-':<21} {counted(len(own), 'target')}"
        line += f", {format_bytes(used)} of {format_bytes(capacity)}" if capacity else ""
        lines.append(line + "".join(f", {count} {how}" for how, count in counts.items() if count))
    return lines


def _chain(chain: Chain, reports: dict[int, TargetReport | None], unwanted: dict[int, str]) -> str:
    from fireflyer.fs.schema.manager import Condition
    from fireflyer.fs.schema.routing import TargetState

    source = next((reports.get(one.target) for one in chain.members if one.state is TargetState.SERVING), None)
    parts = []
    for member in chain.members:
        text = f"{member.target} {member.state}"
        report = reports.get(member.target)
        if member.state is TargetState.SYNCING and source is not None and report is not None and source.used_bytes:
            text += f" (about {min(99, 100 * report.used_bytes // source.used_bytes)} % copied)"
        if report is not None and report.condition is Condition.GONE:
            text += f" (failed: see the log of node {member.node})"
        elif report is not None and not report.clean:
            text += " (possibly stale)"
        if member.target in unwanted:
            text += f" ({unwanted[member.target]})"
        parts.append(text)
    return f"  chain {chain.id:<4} v{chain.version:<5} {', '.join(parts)}"


def _whole(chain: Chain) -> bool:
    from fireflyer.fs.schema.routing import TargetState

    return all(member.state is TargetState.SERVING for member in chain.members)
