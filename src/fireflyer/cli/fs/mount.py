"""`ff fs mount` and `ff fs umount`: the files of a cluster as a directory of this machine (FUSE)."""

from __future__ import annotations

import errno
import os
import sys
from shlex import quote
from typing import TYPE_CHECKING, Final

import click

from fireflyer.base.errors import Busy, FireflyerError, UsageError
from fireflyer.cli.detached import report, report_failure, run_detached
from fireflyer.cli.fs.connect import ClusterTarget, where_options
from fireflyer.cli.units import unit_option

if TYPE_CHECKING:
    from fireflyer.fs.mount.daemon import MountOptions
    from fireflyer.runtime.address import Address

__all__ = ["mount_command", "umount_command"]

MOUNT_LOG: Final = "mount.log"


@click.command(
    "mount", short_help="Mount the files of a cluster on a directory.", epilog="Example: ff fs mount mnt --dir fs -d"
)
@where_options
@click.option(
    "--allow-other", is_flag=True, help="Let other users of this machine use the mount, each with their own uid."
)
@click.option("--read-only", is_flag=True, help="Refuse all changes through this mount (EROFS).")
@click.option(
    "--metrics",
    "metrics_listen",
    metavar="HOST:PORT",
    help="Serve Prometheus metrics there, without authentication.  [default: none]",
)
@click.option(
    "--log", "log_path", metavar="FILE", help="Log of the mount with --detach.  [default: mount.log in --dir, or none]"
)
@click.option("-d", "--detach", is_flag=True, help="Return when it is mounted; `ff fs umount PLACE` ends it.")
@unit_option
@click.option("--report-fd", type=int, hidden=True)
@click.argument("place", metavar="PLACE")
def mount_command(
    *,
    where: ClusterTarget,
    place: str,
    allow_other: bool,
    read_only: bool,
    metrics_listen: str | None,
    log_path: str | None,
    detach: bool,
    unit: str | None,
    report_fd: int | None,
) -> int:
    """Mount the files of a cluster on PLACE, an empty directory, until Ctrl-C, SIGTERM or `ff fs umount PLACE`.

    With the node secret (--secret-file, or --dir, a cluster of `ff fs up` on this machine) the mount is trusted: each
    program acts as its own user. With a user's token (--token-file), all programs act as that user.

    What a program has written is stored when it closes the file or calls fsync; others who open the file after that see
    it.

    At boot: --unit, with the options of the mount.
    """
    from fireflyer.fs.mount.daemon import MountOptions, check_place
    from fireflyer.identity import NodeCredential
    from fireflyer.runtime.address import parse_listen

    if not place:
        raise UsageError("PLACE is an empty string; give an empty directory")
    if log_path is not None and not detach and report_fd is None:
        raise UsageError("--log needs --detach; without --detach the log is standard error")
    if metrics_listen is not None:
        parse_listen(metrics_listen)
    trusted = bool(where.directory) or isinstance(where.credential, NodeCredential)
    if allow_other and not trusted:
        raise UsageError(
            "--allow-other cannot be combined with a user's token, as which all users would act; mount with "
            "--secret-file"
        )
    name = f"ff://{os.path.abspath(where.directory) if where.directory else ','.join(where.managers)}"
    options = MountOptions(
        name=name,
        allow_other=allow_other,
        read_only=read_only,
        check_rights=trusted,
        metrics_listen=metrics_listen or "",
    )
    if unit is not None:
        if detach or log_path is not None:
            raise UsageError("--unit cannot be combined with --detach or --log; systemd runs it, and keeps its log")
        return _print_unit(unit, where, place, options)
    check_place(place, options)
    if detach:
        return run_detached(sys.argv[1:], log_path or _default_log(where))
    return _run(where, place, options, trusted, report_fd)


def _print_unit(unit: str, where: ClusterTarget, place: str, options: MountOptions) -> int:
    from fireflyer.cli.fs.mount_unit import print_mount_unit
    from fireflyer.fs.tools.default_cluster import default_token_file

    given = click.get_current_context().params
    secret_file, token_file = given["secret_file"], given["token_file"]
    if secret_file is None and token_file is None:
        token_file = default_token_file()
    flags = {"--allow-other": options.allow_other, "--read-only": options.read_only}
    words = [flag for flag, on in flags.items() if on]
    if options.metrics_listen:
        words += ["--metrics", options.metrics_listen]
    return print_mount_unit(
        unit, where, place, tuple(words), {"--secret-file": secret_file, "--token-file": token_file}
    )


def _default_log(where: ClusterTarget) -> str:
    return os.path.join(where.directory, MOUNT_LOG) if where.directory else os.devnull


def _run(where: ClusterTarget, place: str, options: MountOptions, trusted: bool, report_fd: int | None) -> int:
    from fireflyer.fs.client.connecting import connect_async
    from fireflyer.fs.client.files.open_file_table import FileOptions
    from fireflyer.fs.mount.daemon import serve_mount
    from fireflyer.fs.mount.files import MountedFiles
    from fireflyer.runtime import run
    from fireflyer.runtime.processes.service_manager import ServiceManager
    from fireflyer.runtime.service_log import start_logging

    service_manager = ServiceManager()
    start_logging()
    credential = None if where.directory else where.credential  # a directory has one
    # Who may set the kernel's readahead needs none of ours.
    files_options = FileOptions(ahead_bytes=0) if os.geteuid() == 0 else FileOptions()

    ready = False

    def on_ready(metrics: Address | None) -> None:
        nonlocal ready
        ready = True
        figures = f"  metrics: http://{metrics}/metrics\n" if metrics is not None else ""
        report(report_fd, f"Mounted on {quote(place)}; unmount: ff fs umount {quote(place)}\n{figures}")
        service_manager.ready()

    async def serve() -> None:
        files = await connect_async(
            options.name, credential=credential, name=f"mount of {place}"[:128], options=files_options
        )
        await serve_mount(place, MountedFiles(files, trusted=trusted), options, on_ready=on_ready)

    try:
        run(serve())
    except FireflyerError as error:
        if not ready:
            report_failure(report_fd, error.message)
        raise
    return 0


@click.command("umount", short_help="Unmount what `ff fs mount` mounted.", epilog="Example: ff fs umount mnt")
@click.option("--lazy", is_flag=True, help="Unmount at once although programs use it; their next file operations fail.")
@click.argument("place", metavar="PLACE")
def umount_command(*, place: str, lazy: bool) -> int:
    """Unmount PLACE, the directory that was given to `ff fs mount`. When it returns, what programs have written is
    stored; not so with --lazy."""
    from fireflyer.fs.mount.daemon import unmount, unmount_and_wait

    if not place:
        raise UsageError("PLACE is an empty string; give the directory of a mount")
    stored = True
    try:
        if lazy:
            unmount(os.path.abspath(place), lazy=True)
        else:
            stored = unmount_and_wait(os.path.abspath(place))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise Busy(
                f"{place} is in use; end the programs that use it (fuser -vm {quote(place)} lists them), or: ff fs "
                f"umount --lazy {quote(place)}"
            ) from None
        if error.errno in (errno.EINVAL, errno.ENOENT):
            raise UsageError(f"{place} is not a mount of `ff fs mount`; `mount -t fuse.fireflyer` lists them") from None
        raise UsageError(f"{place} cannot be unmounted: {error.strerror}") from None
    click.echo(
        f"{quote(place)} is unmounted" + ("." if stored else "; its process may still be writing data to the cluster.")
    )
    return 0
