"""`ff data`: data sets of record shards."""

from __future__ import annotations

from fireflyer.cli.data.pack import pack_command
from fireflyer.cli.data.show import info_command, verify_command
from fireflyer.cli.fs.sections import SectionedGroup

__all__ = ["command"]

command = SectionedGroup(
    "data",
    short_help="Data sets: make them of files, JSONL or Parquet; look at them.",
    help="""Data sets of record shards, which ranks read at random and resume exactly: `fireflyer.data` in Python.

    A data set is a directory of this machine, or ff://HOST:PORT/path or ff:///path in 3FS; the cluster of ff:///path is
    the one that $FIREFLYER_FS names, else that in ./fs, else that of `ff up` in ./platform.""",
    sections={"Data sets": (pack_command, info_command, verify_command)},
    examples=(
        ("ff data pack --format jsonl --field text web.jsonl ff:///data/web", "a record for each line"),
        ("ff data info ff:///data/web", "records, bytes, lengths, shards"),
        ("ff data verify ff:///data/web", "read all of it, and check every checksum"),
    ),
)
