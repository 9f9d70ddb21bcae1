"""Copies a corpus into the file system."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from fireflyer.data.files import read_file
from fireflyer.recipes.corpus import Corpus

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["store_corpus"]

_MAX_FILE_BYTES: Final = 64 << 20


def store_corpus(files: FileSystem, directory: str, corpus: Corpus) -> dict[str, bytes]:
    """The directory of `corpus` at `directory`, where `open_corpus` finds it; what says which is the current one is
    written last. Returns the files by name."""
    parent, name = os.path.split(corpus.directory)
    names = [*(os.path.join(name, one) for one in sorted(os.listdir(corpus.directory))), "current.json"]
    content = {one: read_file(os.path.join(parent, one), max_bytes=_MAX_FILE_BYTES) for one in names}
    files.makedirs(os.path.join(directory, name), exist_ok=True)
    for one, data in content.items():
        with files.open(os.path.join(directory, one), "wb") as file:
            file.write(data)
            file.fsync()
    return content
