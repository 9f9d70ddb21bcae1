"""The inputs of a pack: which files, in which order, and what tells whether they are the same at a restart."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.data.manifest import MANIFEST_NAME, is_shard_file
from fireflyer.data.places import Place, place_of, translated
from fireflyer.fs.tools.trees import Walked, walk

__all__ = ["ENDINGS", "Format", "Input", "InputsDigest", "find_inputs", "open_input"]

Format = Literal["files", "jsonl", "parquet"]
ENDINGS: Final[dict[Format, tuple[str, ...]]] = {
    "files": (),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
"""Of the names that are taken below a directory; none: all."""
MAX_INPUTS: Final = 10_000_000


class Input(NamedTuple):
    place: Place
    name: str
    """Below the directory that was given, or the name of the file that was."""
    size: int
    mtime_ns: int


def find_inputs(
    paths: Sequence[str], format_: Format, *, target: Place | None = None, token_file: str | None = None
) -> list[Input]:
    """Each file that is named, and all regular files below each directory, in the order of their paths; symbolic links
    below directories are left out, hidden names are, and what a pack into `target` makes there: it is none of the
    inputs, of which a restart must find the same. Raises `NotFound`, `UsageError`."""
    found: list[Input] = []
    for path in paths:
        place = place_of(path, token_file=token_file)
        made_in = None if target is None else _below(place, target)
        with translated(f"read {place.name}"):
            before = len(found)
            for one in walk(_tree(place), place.path, follow=True):
                if _is_wanted(one, format_) and not _is_made(one, made_in):
                    found.append(_input_of(place, one))
                if len(found) > MAX_INPUTS:
                    raise UsageError(f"more than {MAX_INPUTS} files; pack them in several data sets")
        if len(found) == before:
            endings = " or ".join(ENDINGS[format_])
            raise NotFound(f"{place.name} holds no files{f' that end in {endings}' if endings else ''}")
    return found


def _tree(place: Place) -> Any:
    return place.files


def _is_wanted(one: Walked, format_: Format) -> bool:
    if not stat.S_ISREG(one.attributes.st_mode):
        return False
    if not one.relative:  # it was named
        return True
    if any(part.startswith(".") for part in one.relative.split("/")):
        return False
    return not ENDINGS[format_] or one.relative.endswith(ENDINGS[format_])


def _below(place: Place, target: Place) -> str | None:
    """Where `target` is below `place`, as `Walked.relative` says it; None where it is not."""
    if place.remote != target.remote or (place.remote and place.files is not target.files):
        return None
    above, below = place.path, target.path
    if not place.remote:
        above, below = os.path.realpath(above), os.path.realpath(below)
    if above == below:
        return ""
    above = above.rstrip("/") + "/"
    return below[len(above) :] if below.startswith(above) else None


def _is_made(one: Walked, made_in: str | None) -> bool:
    directory, _, name = one.relative.rpartition("/")
    return directory == made_in and (is_shard_file(name) or name == MANIFEST_NAME)


def _input_of(place: Place, one: Walked) -> Input:
    name = one.relative or place.path.rpartition("/")[2]
    where = place.below(one.relative) if one.relative else place
    return Input(where, name, one.attributes.st_size, one.attributes.st_mtime_ns)


class InputsDigest:
    """Of the places, sizes and times of the first inputs, for ever more of them."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = inputs
        self._digest = hashlib.blake2b(digest_size=16)
        self._count = 0

    def of_first(self, count: int) -> str:
        """`count` must not become less from call to call."""
        for one in self._inputs[self._count : count]:
            text = f"{one.place.name}\0{one.size}\0{one.mtime_ns}\n"
            self._digest.update(text.encode("utf-8", "surrogateescape"))
        self._count = max(self._count, count)
        return self._digest.hexdigest()


def open_input(one: Input) -> Any:
    """A binary file object at its beginning. Raises `FireflyerError`."""
    with translated(f"open {one.place.name}"):
        opener: Callable[..., Any] = _tree(one.place).open
        return opener(one.place.path, "rb")
