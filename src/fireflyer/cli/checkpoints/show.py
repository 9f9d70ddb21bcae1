"""`ff ckpt ls`, `show`, `verify`: looking at checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from fireflyer.base.units import counted, format_bytes
from fireflyer.cli.checkpoints.passed_over import say_passed_over
from fireflyer.cli.fs.files.common import clean
from fireflyer.cli.jobs.hosts import columns

if TYPE_CHECKING:
    from fireflyer.checkpoint.core.manifest import Manifest
    from fireflyer.checkpoint.engine.ranges import StoredTensor
    from fireflyer.checkpoint.reader import CheckpointInfo, Opened

__all__ = ["ls_command", "show_command", "verify_command"]

JSON_LINES = "One JSON object for each checkpoint."


@click.command("ls", short_help="List checkpoints.", epilog="Example: ff ckpt ls runs/checkpoints")
@click.argument("directory", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help=JSON_LINES)
def ls_command(*, directory: str, as_json: bool) -> int:
    """List the checkpoints in DIR, newest first: step, size, ranks, when and by whom, and whether one is pinned. Only
    manifests are read; `ff ckpt verify` reads everything."""
    from fireflyer.checkpoint import describe

    found = describe(directory, other_names=True)
    if not found:
        _refuse_checkpoint(directory)
    if as_json:
        for info in found:
            click.echo(msgspec.json.encode(info))
        return 0
    if not found:
        click.echo(f"no checkpoint in {clean(directory)}")
        return 0
    rows = [("NAME", "STEP", "SIZE", "RANKS", "SAVED", "BY", "STATE")]
    click.echo(columns([*rows, *map(_row, found)]))
    return 0


def _refuse_checkpoint(directory: str) -> None:
    """Who names a checkpoint, and not the directory of several, is told so, and not that there is none."""
    from fireflyer.base.errors import UsageError
    from fireflyer.checkpoint.core.names import MANIFEST_FILE
    from fireflyer.checkpoint.storage import open_storage

    disk, root, shown = open_storage(directory)
    if disk.exists(f"{root}/{MANIFEST_FILE}"):
        raise UsageError(f"{shown} is a checkpoint: `ff ckpt show` shows it; `ff ckpt ls` takes the directory above")


def _row(info: CheckpointInfo) -> tuple[str, ...]:
    size = "-" if info.size_bytes is None else format_bytes(info.size_bytes)
    ranks = "-" if info.world_size is None else str(info.world_size)
    at, by = _when(info), _who(info)
    state = ["pinned"] if info.pinned else []
    if info.problem is not None:
        state.append(clean(info.problem) if info.denied else f"damaged: {clean(info.problem)}")
    return clean(info.name), str(info.step), size, ranks, at, by, ", ".join(state) or "-"


def _when(info: CheckpointInfo) -> str:
    return clean(info.saved.at) if info.saved is not None and info.saved.at else "-"


def _who(info: CheckpointInfo) -> str:
    if info.saved is None or not (info.saved.user or info.saved.host):
        return "-"
    return clean("@".join(part for part in (info.saved.user, info.saved.host) if part))


class _TensorView(msgspec.Struct, frozen=True):
    """A tensor, as `ff ckpt show --json` says it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    slices: int
    """1: it is stored whole."""
    mesh: tuple[int, ...] = ()
    placements: tuple[str, ...] = ()


@click.command("show", short_help="Show what is in a checkpoint.", epilog="Example: ff ckpt show runs/checkpoints")
@click.argument("path", metavar="PATH")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show_command(*, path: str, as_json: bool) -> int:
    """Show the checkpoint PATH, or the newest of those in PATH: step, time, job, and each tensor with its type, shape
    and size, and how it was sharded. Only the manifest is read."""
    from fireflyer.checkpoint.engine.ranges import TensorReader
    from fireflyer.checkpoint.reader import look, open_checkpoint

    opened = open_checkpoint(path)
    say_passed_over(opened.passed_over, opened.name)
    info = look(opened.disk, opened.root, opened.name, opened.disk.list(opened.root), deep=False)
    reader = TensorReader(opened.disk, opened.root, opened.name, opened.manifest)
    tensors = [_view(tensor) for tensor in reader.tensors.values()]
    if as_json:
        described: dict[str, Any] = {**msgspec.to_builtins(info), "files": len(opened.manifest.shards)}
        described |= {"values": opened.manifest.values, "tensors": tensors}
        click.echo(msgspec.json.encode(described))
        return 0
    _print_facts(opened, info, opened.manifest)
    rows = [("TENSOR", "TYPE", "SHAPE", "SIZE", "STORED")]
    click.echo(columns([*rows, *map(_tensor_row, tensors)]))
    return 0


def _print_facts(opened: Opened, info: CheckpointInfo, manifest: Manifest) -> None:
    facts = [
        ("checkpoint", f"{opened.root}/{info.name}" + (" (pinned)" if info.pinned else "")),
        ("step", str(info.step)),
        ("saved", f"{_when(info)} by {_who(info)}"),
        ("program", manifest.saved.program if manifest.saved is not None and manifest.saved.program else "-"),
        ("job", f"{counted(manifest.world_size, 'rank')}, attempt {manifest.attempt}"),
        ("size", f"{format_bytes(info.size_bytes or 0)} in {counted(len(manifest.shards), 'file')}"),
        ("values", ", ".join(sorted(manifest.values)) or "none"),
    ]
    click.echo("\n".join(f"{name:<10} {clean(text)}" for name, text in facts) + "\n")


def _view(tensor: StoredTensor) -> _TensorView:
    part = tensor.parts[0].slice
    mesh, placements = ((), ()) if part is None else (part.mesh, part.placements)
    return _TensorView(tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes, len(tensor.parts), mesh, placements)


def _tensor_row(view: _TensorView) -> tuple[str, ...]:
    stored = "whole" if view.slices == 1 else counted(view.slices, "slice")
    if view.placements:
        axes = "x".join(map(str, view.mesh))
        stored += f" of a mesh of {axes}: {', '.join(map(clean, view.placements))}"
    shape = "x".join(map(str, view.shape)) or "scalar"
    return clean(view.name), view.dtype, shape, format_bytes(view.size_bytes), stored


class _Verified(msgspec.Struct, frozen=True):
    """As `ff ckpt verify --json` says it."""

    name: str
    step: int
    size_bytes: int | None
    problems: tuple[str, ...]
    denied: bool = False
    """It may not be read, which is its problem: nothing is known of damage."""


@click.command("verify", short_help="Read every byte of checkpoints, and say what is damaged.",
               epilog="Example: ff ckpt verify runs/checkpoints/step-00000100")  # fmt: skip
@click.argument("path", metavar="PATH")
@click.option("--json", "as_json", is_flag=True, help=JSON_LINES)
def verify_command(*, path: str, as_json: bool) -> int:
    """Read every byte of the checkpoint PATH, or of all in PATH, and compare it with the checksums. Each file and each
    tensor that is damaged is named; the exit code is then 1, as where one may not be read."""
    damaged = False
    for verified in _verified(path):
        damaged = damaged or bool(verified.problems)
        if as_json:
            click.echo(msgspec.json.encode(verified))
            continue
        size = "" if verified.size_bytes is None else f", {format_bytes(verified.size_bytes)}"
        state = "not read" if verified.denied else "damaged" if verified.problems else "whole"
        click.echo(f"{clean(verified.name)}: {state} (step {verified.step}{size})")
        for problem in verified.problems:
            click.echo(f"  {clean(problem)}")
    return 1 if damaged else 0


def _verified(path: str) -> list[_Verified]:
    from fireflyer.base.errors import NotFound, PermissionDenied
    from fireflyer.checkpoint.core.names import MANIFEST_FILE, parse_final
    from fireflyer.checkpoint.reader import describe, is_gone, look
    from fireflyer.checkpoint.storage import open_storage
    from fireflyer.checkpoint.upkeep import damages

    disk, root, shown = open_storage(path)
    name = root.rpartition("/")[2]
    if disk.exists(f"{root}/{MANIFEST_FILE}") or (parse_final(name) is not None and disk.is_dir(root)):
        root = root.rpartition("/")[0]
        found = [look(disk, root, name, disk.list(root), deep=False)]
    else:
        found = describe(path, other_names=True)
    if not found:
        raise NotFound(f"no checkpoint in {shown}")
    verified = []
    for info in found:
        denied = info.denied
        try:
            problems = (info.problem,) if info.problem is not None else tuple(damages(disk, root, info.name))
        except PermissionDenied as error:
            problems, denied = (error.message,), True
        if problems and is_gone(disk, root, info.name):
            continue
        verified.append(_Verified(info.name, info.step, info.size_bytes, problems, denied))
    if not verified:
        raise NotFound(f"{shown} was removed by the job that saves there, or all in it were; run the command again")
    return verified
