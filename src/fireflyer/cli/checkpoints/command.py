"""`ff ckpt`: checkpoints that are there."""

from __future__ import annotations

from typing import Final

import click

from fireflyer.base.units import SECOND
from fireflyer.cli.checkpoints.change import pin_command, rm_command, unpin_command
from fireflyer.cli.checkpoints.convert import export_command, import_command
from fireflyer.cli.checkpoints.show import ls_command, show_command, verify_command
from fireflyer.cli.fs.sections import SectionedGroup

__all__ = ["command"]

PATIENCE_NS: Final = 60 * SECOND
"""For data of 3FS that no storage node serves: a node that has died is noticed, and one that is started again serves,
within this. Jobs wait longer, and so does an import, which may have written for hours."""


def _begin() -> None:
    from fireflyer.checkpoint.storage import wait_for_chunks

    if click.get_current_context().invoked_subcommand != "import":
        wait_for_chunks(PATIENCE_NS)


command = SectionedGroup(
    "ckpt",
    callback=_begin,
    short_help="List, verify, keep, remove, export and import checkpoints.",
    help="""Checkpoints that `TrainingLoop`, `CheckpointManager` or `dcp.save` with `FireFlyerWriter` have saved.

    PATH is one checkpoint (runs/checkpoints/step-00000100), DIR the directory that holds them; both may be of the
    file system: ff://HOST:PORT/ckpt/run1, or ff:///ckpt/run1 in the cluster that $FIREFLYER_FS names, else that in
    ./fs, else that of `ff up` in ./platform.""",
    sections={
        "Look at them": (ls_command, show_command, verify_command),
        "Keep and remove": (pin_command, unpin_command, rm_command),
        "Other programs": (export_command, import_command),
    },
    examples=(
        ("ff ckpt ls runs/checkpoints", "steps, sizes, when and by whom"),
        ("ff ckpt verify runs/checkpoints", "which file and which tensor is damaged"),
        ("ff ckpt pin runs/checkpoints/step-00000100", "no job removes it"),
        ("ff ckpt export runs/checkpoints model", "safetensors files as Hugging Face has them"),
    ),
)
