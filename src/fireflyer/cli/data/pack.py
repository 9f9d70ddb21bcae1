"""`ff data pack`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, cast

import click

from fireflyer.base.errors import UsageError
from fireflyer.base.units import counted, format_bytes, parse_bytes
from fireflyer.cli.data.progress import Progress
from fireflyer.cli.fs.files.common import say

if TYPE_CHECKING:
    from fireflyer.data.packing.inputs import Format

__all__ = ["pack_command", "token_file_option"]

_FORMATS: Final = ("files", "jsonl", "parquet")
_MIN_SHARD_BYTES: Final = 4096

token_file_option = click.option(
    "--token-file",
    metavar="FILE",
    help="Token of a user, where ff:// names managers.  [default: what $FIREFLYER_FS_TOKEN_FILE names]",
)


@click.command(
    "pack",
    short_help="Make a data set of files, JSONL or Parquet.",
    epilog="Example: ff data pack -f jsonl --field text web.jsonl ff:///data/web",
)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.argument("target", metavar="TARGET")
@click.option(
    "-f", "--format", "form", type=click.Choice(_FORMATS), default="files", show_default=True,
    help="What a record is: a whole file, a line of JSON, a row of Parquet.",
)  # fmt: skip
@click.option("--field", metavar="NAME", help="JSONL: the field of each object.  [default: the whole line]")
@click.option(
    "--column", "columns", metavar="NAME", multiple=True,
    help="Parquet: the column; repeat it for a JSON object of several.  [default: the only one]",
)  # fmt: skip
@click.option(
    "--tokenizer", metavar="FILE",
    help="Store uint16 tokens of the text: a file of BpeTokenizer.save, or the word `bytes`.  [default: the text]",
)  # fmt: skip
@click.option("--no-end-of-text", is_flag=True, help="With --tokenizer: put no END_OF_TEXT after each record.")
@click.option(
    "--shard-size", metavar="SIZE", default="64MiB", show_default=True, help="Size of a shard, such as 256MiB."
)
@click.option(
    "--skip-invalid", is_flag=True,
    help="Leave out what cannot be a record, and say so, instead of stopping there.",
)  # fmt: skip
@click.option("--restart", is_flag=True, help="Begin anew what was left unfinished in TARGET.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress and no summary.")
@token_file_option
def pack_command(
    *,
    sources: tuple[str, ...],
    target: str,
    form: str,
    field: str | None,
    columns: tuple[str, ...],
    tokenizer: str | None,
    no_end_of_text: bool,
    shard_size: str,
    skip_invalid: bool,
    restart: bool,
    quiet: bool,
    token_file: str | None,
) -> None:
    """Pack each SOURCE, a file or a directory, into a new data set in TARGET. All of them may be ff://... in 3FS.

    The data set is there when all of it is. The same command goes on with one that was interrupted.
    """
    from fireflyer.data.packing import PackOptions, encoding_of, pack

    encoding = encoding_of(tokenizer, end_of_text=not no_end_of_text)
    options = PackOptions(
        format=cast("Format", form),
        field=field,
        columns=columns,
        shard_bytes=_shard_bytes(shard_size),
        skip_invalid=skip_invalid,
        restart=restart,
        token_file=token_file,
    )
    with Progress(f"Packing {os.path.basename(target.rstrip('/'))}", quiet=quiet) as progress:
        packed = pack(sources, target, encoding, options, progress)
    if not quiet:
        said = [
            f"{counted(packed.records, 'record')} ({format_bytes(packed.data_bytes)}) in "
            f"{counted(packed.shards, 'shard')}"
        ]
        if packed.continued:
            said.append(f"{packed.continued} of them packed before")
        if packed.skipped:
            said.append(f"{packed.skipped} left out")
        say(", ".join(said))


def _shard_bytes(text: str) -> int:
    from fireflyer.data.shard_format import MAX_SHARD_BYTES

    try:
        size = parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"--shard-size: {error.message}") from None
    if not _MIN_SHARD_BYTES <= size <= MAX_SHARD_BYTES:
        raise UsageError(
            f"--shard-size {text}: it must be {format_bytes(_MIN_SHARD_BYTES)} to {format_bytes(MAX_SHARD_BYTES)}"
        )
    return size
