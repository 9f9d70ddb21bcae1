"""Dumps as files: where a rank writes its own, and how those of all ranks are found again.

`DIRECTORY/<group>/flight-<rank>.json` is the dump, `DIRECTORY/<group>/torch_rank_<rank>` the same for PyTorch's
analyser. Each of the two tools takes `DIRECTORY/<group>` and finds its own: `ff collectives explain` (which also takes
`DIRECTORY`), and `torchfrtrace` (which tells ranks by the digits at the end of a name, and takes no directory with such
names of two kinds). A rank that dumps again replaces what it dumped before.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Sequence
from typing import Final

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.collectives.flight.dump import MAX_DUMP_BYTES, Dump, decode_dump, encode_dump
from fireflyer.collectives.flight.trace import encode_trace
from fireflyer.runtime.disk import translate_os_error

__all__ = ["dump_path", "find_dumps", "read_dumps", "write_dump"]

_DUMP: Final = re.compile(r"flight-[0-9]{1,5}\.json")
_UNFIT: Final = re.compile(r"[^A-Za-z0-9.=+-]+")
MAX_FILES: Final = 1 << 17


def dump_path(directory: str, group: str, rank: int) -> str:
    return os.path.join(directory, _UNFIT.sub(".", group).strip(".") or "group", f"flight-{rank}.json")


def write_dump(directory: str, dump: Dump) -> str:
    """Writes both files and returns the path of the dump. Raises `FireflyerError`, never leaving half a file."""
    path = dump_path(directory, dump.group, dump.rank)
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _replace(path, encode_dump(dump))
        _replace(os.path.join(folder, f"torch_rank_{dump.rank}"), encode_trace(dump))
    except OSError as error:
        raise translate_os_error(error, f"write the dump {path}") from error
    return path


def _replace(path: str, data: bytes) -> None:
    partial = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def find_dumps(places: Sequence[str]) -> list[str]:
    """The files that `places` name: files, directories (with all below them), and patterns that the shell left alone.
    Raises `NotFound` for a place with none, `UsageError` for a bad file name."""
    found: dict[str, None] = {}
    for place in places:
        for path in _files_at(place):
            found[os.path.realpath(path)] = None
            if len(found) > MAX_FILES:
                raise UsageError(f"more than {MAX_FILES} dumps; give those of one job")
    return list(found)


def _files_at(place: str) -> list[str]:
    if os.path.isfile(place):
        return [place]
    if os.path.isdir(place):
        below = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(place)
            for name in sorted(names)
            if _DUMP.fullmatch(name)
        ]
        if below:
            return below
        raise NotFound(
            f"{place!r} contains no dumps (flight-RANK.json); a rank writes one when a collective fails, "
            "to RUN_DIR/flight under `ff run`, else to the directory that FF_DUMP_DIR or dump_dir= names"
        )
    matching = [path for match in sorted(glob.glob(place, recursive=True)) for path in _files_at(match)]
    if not matching:
        raise NotFound(f"{place!r} does not exist; give the dumps of a job, or the directory that holds them")
    return matching


def read_dumps(paths: Sequence[str]) -> list[tuple[str, Dump]]:
    """(path, dump) of each. Raises `NotFound`, `DataCorruption`, `UsageError`, naming the file."""
    dumps = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_DUMP_BYTES + 1)
        except OSError as error:
            raise translate_os_error(error, f"read the dump {path}") from error
        dumps.append((path, decode_dump(data, name=path)))
    return dumps
