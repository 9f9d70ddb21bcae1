"""A corpus in the file system 3FS, read through its Python interface while training goes on.

    DIRECTORY/corpus.json     the figures of the corpus that it was copied from
    DIRECTORY/tokens          all its tokens, uint16 little endian, one record after the other
    DIRECTORY/tokenizer.json

`store_corpus` copies a local one; `corpus.json` is written last, so a corpus that is there is whole.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import DataCorruption, NotFound
from fireflyer.base.units import format_bytes
from fireflyer.data.files import read_file
from fireflyer.recipes.corpus import Corpus

if TYPE_CHECKING:
    from fireflyer.fs.client.files.file_objects import OpenFile
    from fireflyer.fs.client.files.file_system import FileSystem

__all__ = ["StoredCorpus", "files_of", "open_stored_corpus", "store_corpus"]

FIGURES: Final = "corpus.json"
TOKENS: Final = "tokens"
TOKENIZER: Final = "tokenizer.json"
_MAX_FIGURES_BYTES: Final = 1 << 16
_MAX_TOKENIZER_BYTES: Final = 64 << 20
_TOKEN: Final = np.dtype("<u2")


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str
    tokens: int
    vocab_size: int


class StoredCorpus:
    """Of `open_stored_corpus`. Threads may use it at the same time."""

    def __init__(self, url: str, figures: _Figures, file: OpenFile) -> None:
        self.directory = url
        self.fingerprint = figures.fingerprint
        self.vocab_size = figures.vocab_size
        self.tokens = figures.tokens
        self._file = file

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens `[first, first + count)`, int64. Raises `DataCorruption`, `OSError`."""
        row = np.empty(count, _TOKEN)
        if self._file.pread_into(row, first * _TOKEN.itemsize) != row.nbytes:
            raise DataCorruption(f"{self.directory}/{TOKENS} ends before token {first + count}; store the corpus again")
        tokens = row.astype(np.int64)
        if int(tokens.max(initial=0)) >= self.vocab_size:
            raise DataCorruption(
                f"{self.directory}/{TOKENS}: token {tokens.max()} near {first}, the vocabulary has {self.vocab_size}"
            )
        return tokens

    def __str__(self) -> str:
        return f"{format_bytes(self.tokens * _TOKEN.itemsize)} in {self.directory}, {self.tokens / 1e6:.2f} M tokens"


def open_stored_corpus(url: str) -> StoredCorpus:
    """`url`: as fsspec takes it, `ff:///corpus` in the cluster that FIREFLYER_FS names. Raises `NotFound`,
    `DataCorruption`, `FireflyerError`."""
    from fsspec.core import url_to_fs

    found, path = url_to_fs(url)
    files: FileSystem = found.files
    try:
        with files.open(f"{path}/{FIGURES}", "rb") as file:
            figures = msgspec.json.decode(file.read(_MAX_FIGURES_BYTES), type=_Figures)
        tokens = files.open_file(f"{path}/{TOKENS}")
    except FileNotFoundError as error:
        raise NotFound(f"{url} holds no corpus ({error}); store one there first") from None
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{url}/{FIGURES} is damaged: {error}; store the corpus again") from None
    return StoredCorpus(url, figures, tokens)


def files_of(corpus: Corpus) -> dict[str, bytes]:
    """What is stored of a local corpus, by name; in the order in which it is written."""
    with corpus.records() as records:
        tokens = b"".join(bytes(record) for record in records)
    figures = _Figures(fingerprint=corpus.fingerprint, tokens=corpus.tokens, vocab_size=corpus.vocab_size)
    tokenizer = read_file(os.path.join(corpus.directory, TOKENIZER), max_bytes=_MAX_TOKENIZER_BYTES)
    return {TOKENS: tokens, TOKENIZER: tokenizer, FIGURES: msgspec.json.encode(figures)}


def store_corpus(files: FileSystem, directory: str, corpus: Corpus) -> dict[str, bytes]:
    """Writes a local corpus to `directory`, made if it is absent; what is there is replaced. Returns the files."""
    content = files_of(corpus)
    files.makedirs(directory, exist_ok=True)
    for name, data in content.items():
        with files.open(f"{directory}/{name}", "wb") as file:
            file.write(data)
            file.fsync()
    return content
