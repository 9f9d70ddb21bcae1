"""`ff fs fsck`: is everything in its place?"""

from __future__ import annotations

import click

from fireflyer.base.errors import UsageError
from fireflyer.cli.fs.files.common import Bars, PathResolver, clean, files_options

__all__ = ["fsck_command"]


@click.command("fsck", short_help="Compare names, files and chunks, while they are used.")
@click.option("--names-only", is_flag=True, help="Leave the chunks out.")
@click.option("--repair", is_flag=True, help="Remove chunks that no file owns.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before that.")
@files_options
def fsck_command(*, names_only: bool, repair: bool, yes: bool, places: PathResolver) -> int:
    """Compare names with inodes and chunks with files, both ways. What is wrong is looked at twice, some seconds apart,
    so the file system may be in use. Ends with 1 when anything stays wrong. Needs the node secret: --dir, or --manager
    with --secret-file."""
    from fireflyer.base.units import counted, format_bytes
    from fireflyer.fs.tools.fsck import Fsck

    if repair and names_only:
        raise UsageError("--repair removes chunks that no file owns; leave out --names-only")
    root = places.remote("/")
    with places.ring() as ring, Bars(places, "Looking", counts="looked at") as bars:
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
    question = f"Remove {counted(count, 'chunk')} ({format_bytes(size)}) that no file owns?"
    if not (yes or click.confirm(question, err=True)):
        click.echo("Nothing is removed.")
        return 1
    with places.ring() as ring, Bars(places, "Removing", counts="removed") as bars:
        fsck = Fsck(root.tree, ring, progress=lambda what, done, total: bars.at(done, total, what))
        removed = fsck.remove(found.unowned)
    click.echo(f"{counted(removed, 'chunk')} removed.")
    return 1 if len(found.faults) > len(found.unowned) else 0
