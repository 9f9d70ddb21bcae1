"""`ff fs fsck`: compares names, inodes and chunks of a running cluster."""

from __future__ import annotations

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.fs.files.common import Bars, PathResolver, clean, files_options

__all__ = ["fsck_command"]


@click.command(
    "fsck", short_help="Check names, inodes and chunks of a running cluster.", epilog="Example: ff fs fsck --dir fs"
)
@click.option("--names-only", is_flag=True, help="Check names and inodes, not chunks.")
@click.option("--repair", is_flag=True, help="Remove chunks that belong to no file, after a question.")
@click.option("-y", "--yes", is_flag=True, help="With --repair: remove without the question.")
@files_options
def fsck_command(*, names_only: bool, repair: bool, yes: bool, places: PathResolver) -> int:
    """Compare names with inodes, and chunks with files. The file system may be in use: each fault is checked again 6
    seconds later, and reported only if it is still there. One line per fault; exit code 1 if there are any.

    Needs the node secret: --dir, or --manager with --secret-file."""
    from fireflyer.base.units import counted, format_bytes
    from fireflyer.fs.tools.fsck import Fsck

    if repair and names_only:
        raise UsageError("--repair removes chunks, and --names-only does not check chunks; leave one of them out")
    root = places.remote("/")
    with places.ring() as ring, Bars(places, "Checking", counts="checked") as bars:
        fsck = Fsck(root.tree, ring, progress=lambda what, done, total: bars.at(done, total, what))
        found = fsck.run(chunks=not names_only)
    for fault in found.faults:
        where = f"{clean(fault.path)} (inode {fault.inode})" if fault.path else f"inode {fault.inode}"
        click.echo(f"{fault.kind}: {where}: {fault.text}")
    click.echo(
        f"{counted(found.others, 'file')} in {found.directories} director{'y' if found.directories == 1 else 'ies'}"
        + ("" if names_only else f", {counted(found.chunks, 'chunk')}")
        + f": {counted(len(found.faults), 'fault')}."
    )
    if not (repair and found.unowned):
        return 1 if found.faults else 0
    count, size = sum(one.chunks for one in found.unowned), sum(one.bytes for one in found.unowned)
    question = f"Remove {counted(count, 'chunk')} ({format_bytes(size)}) that belong to no file?"
    if not (yes or click.confirm(question, err=True)):
        click.echo("Nothing was removed.")
        return 1
    with places.ring() as ring, Bars(places, "Removing", counts="removed") as bars:
        fsck = Fsck(root.tree, ring, progress=lambda what, done, total: bars.at(done, total, what))
        removed = fsck.remove(found.unowned)
    click.echo(f"{counted(removed, 'chunk')} removed.")
    return 1 if len(found.faults) > len(found.unowned) else 0
