"""`ff ckpt export`, `import`: checkpoints for other programs, and of other programs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import click

from fireflyer.base.units import counted, format_bytes
from fireflyer.cli.checkpoints.passed_over import say_passed_over
from fireflyer.cli.fs.files.common import clean
from fireflyer.cli.numbers import ByteSize, WholeNumber

__all__ = ["export_command", "import_command"]


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what is done here as Ctrl-C does, which removes what is not complete."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command("export", short_help="Write whole tensors as safetensors files.", epilog="""\b
Examples:
  ff ckpt export runs/checkpoints model  # the model of the newest checkpoint
  ff ckpt export runs/checkpoints/step-00000100 all --prefix ''""")  # fmt: skip
@click.argument("path", metavar="PATH")
@click.argument("target", metavar="DIR")
@click.option("--prefix", metavar="TEXT",
              help="Tensors whose names begin with TEXT, without it; '' is all.  [default: the model's]")  # fmt: skip
@click.option("--max-file", "max_file_bytes", type=ByteSize(), metavar="SIZE", default="5GB", show_default=True,
              help="Tensors in one file; a larger tensor has a file of its own.")  # fmt: skip
def export_command(*, path: str, target: str, prefix: str | None, max_file_bytes: int) -> int:
    """Write the tensors of the checkpoint PATH, or of the newest in PATH, into the new directory DIR, whole, however
    they were sharded: model.safetensors, or several files with model.safetensors.index.json, as Hugging Face names
    them. Everything is verified on the way; memory does not grow with the model."""
    from fireflyer.checkpoint.exporting import export

    with _ended_by_sigterm():
        done = export(path, target, prefix=prefix, max_file_bytes=max_file_bytes)
    say_passed_over(done.passed_over, done.checkpoint)
    what = f"{counted(done.tensors, 'tensor')}, {format_bytes(done.size_bytes)}"
    click.echo(f"{clean(target)}: {what} in {counted(len(done.files), 'file')}")
    return 0


@click.command("import", short_help="Make a checkpoint from one of DCP, or from safetensors files.", epilog="""\b
Examples:
  ff ckpt import old/step-100 runs/checkpoints --step 100 --model model
  ff ckpt import llama runs/checkpoints --step 0 --prefix model/""")  # fmt: skip
@click.argument("source", metavar="SOURCE")
@click.argument("directory", metavar="DIR")
@click.option("--step", type=WholeNumber(0), required=True, help="Of the new checkpoint.")
@click.option("--model", metavar="KEY",
              help="Of a checkpoint of DCP: tensors below KEY are the model's.  [default: names stay]")  # fmt: skip
@click.option("--prefix", metavar="TEXT", default="", help="Put before names in safetensors files.  [default: none]")
@click.option("--trust-pickles", is_flag=True, help="Load pickles of SOURCE that could run code.")
def import_command(
    *, source: str, directory: str, step: int, model: str | None, prefix: str, trust_pickles: bool
) -> int:
    """Make the checkpoint DIR/step-… from SOURCE: a directory that torch.distributed.checkpoint wrote, a safetensors
    file, or a directory of them. Names stay as they are, so that dcp.load with FireFlyerReader takes the new one for
    the old; TrainingLoop looks for the model's tensors below model/."""
    from fireflyer.checkpoint.importing import import_checkpoint

    with _ended_by_sigterm():
        done = import_checkpoint(source, directory, step=step, model=model, prefix=prefix, trust_pickles=trust_pickles)
    place = f"{directory.rstrip('/')}/{done.name}"
    click.echo(f"{clean(place)}: {counted(done.tensors, 'tensor')}, {format_bytes(done.size_bytes)}")
    return 0
