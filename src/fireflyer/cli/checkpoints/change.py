"""`ff ckpt pin`, `unpin`, `rm`: which checkpoints stay."""

from __future__ import annotations

import click

from fireflyer.cli.fs.files.common import clean

__all__ = ["pin_command", "rm_command", "unpin_command"]


@click.command("pin", short_help="Keep checkpoints, whatever a job's retention says.",
               epilog="Example: ff ckpt pin runs/checkpoints/step-00000100")  # fmt: skip
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
def pin_command(*, paths: tuple[str, ...]) -> int:
    """Keep each checkpoint PATH: no job removes it, and `ff ckpt rm` refuses to. The newest that a
    job keeps are counted as before."""
    from fireflyer.checkpoint.upkeep import pin

    for path in paths:
        click.echo(f"{clean(path)}: {'pinned' if pin(path) else 'pinned already'}")
    return 0


@click.command("unpin", short_help="Let jobs remove checkpoints again.",
               epilog="Example: ff ckpt unpin runs/checkpoints/step-00000100")  # fmt: skip
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
def unpin_command(*, paths: tuple[str, ...]) -> int:
    """Undo `ff ckpt pin`. The job that saves there removes PATH after its next save, if it keeps fewer."""
    from fireflyer.checkpoint.upkeep import unpin

    for path in paths:
        click.echo(f"{clean(path)}: {'unpinned' if unpin(path) else 'not pinned'}")
    return 0


@click.command("rm", short_help="Remove checkpoints.", epilog="Example: ff ckpt rm runs/checkpoints/step-00000100")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Remove also the last one that is whole.")
def rm_command(*, paths: tuple[str, ...], force: bool) -> int:
    """Remove each checkpoint PATH. A pinned one is refused. Without --force the last whole one is refused too: others
    are read, newest first, until one is found that is whole."""
    from fireflyer.checkpoint.upkeep import remove

    for path in paths:
        remove(path, force=force)
        click.echo(f"{clean(path)}: removed")
    return 0
