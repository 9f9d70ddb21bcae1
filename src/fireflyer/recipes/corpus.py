"""The corpus that every machine has: the sources of the Python standard library, as shards of tokens.

    DIRECTORY/
      current.json             which of the following is meant: {"name": "corpus-0f3a…"}
      corpus-0f3a…/            named by the fingerprint of the sources and of how they were encoded
        dataset.json           record set: one record for each file, its tokens as uint16 and END_OF_TEXT
        shard-00000.ffr …
        tokenizer.json

A build goes on in a hidden directory and is renamed when it is complete, under a lock file: of several processes that
want the same corpus one builds it and the others wait for it. What is there and whole is used again; what is damaged is
built anew. A resumed job reads `current.json` instead of looking at the sources, which an upgrade may have changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sysconfig
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from fireflyer.base.decoding import DECODE_ERRORS, convert, decode_json
from fireflyer.base.errors import DataCorruption, Exists, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Disk
from fireflyer.base.units import MIB, SECOND, format_bytes
from fireflyer.data import END_OF_TEXT, BpeTokenizer, RecordSet, RecordSetWriter
from fireflyer.data.files import make_directories, read_file, replace_file
from fireflyer.data.places import place_of, read_whole
from fireflyer.runtime.disk import RealDisk

__all__ = ["DEFAULT_MAX_BYTES", "DEFAULT_VOCAB_SIZE", "Corpus", "build_corpus", "open_corpus"]

DEFAULT_VOCAB_SIZE: Final = 1024
DEFAULT_MAX_BYTES: Final = 10_000_000

_CURRENT = "current.json"
_TOKENIZER = "tokenizer.json"
_LOCK = ".lock"
_BUILDING = ".building"
_ENCODING_VERSION = 1
_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})
_MAX_SOURCE_BYTES = 4 * MIB
_TOKENIZER_SAMPLE_BYTES = 1_000_000
_SHARD_BYTES = 2 * MIB
_MAX_TOKENIZER_BYTES = 64 * MIB


class _Meta(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str
    files: int
    source_bytes: int
    tokens: int
    vocab_size: int
    build_ns: int


class _Current(msgspec.Struct, frozen=True):
    name: str


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """A complete corpus on disk, and its figures."""

    directory: str
    """Directory of the record set and the tokenizer, or its URL."""
    fingerprint: str
    files: int
    source_bytes: int
    tokens: int
    vocab_size: int
    build_ns: int
    """Time of the build, also when it was another one's."""
    reused: bool

    def records(self) -> RecordSet:
        """One record for each source file: uint16 tokens."""
        return RecordSet(self.directory)

    def tokenizer(self) -> BpeTokenizer:
        place = place_of(self.directory).below(_TOKENIZER)
        return BpeTokenizer.from_json(read_whole(place, _MAX_TOKENIZER_BYTES), name=place.name)

    def __str__(self) -> str:
        how = "reused" if self.reused else f"built in {self.build_ns / SECOND:.1f} s"
        size = format_bytes(self.source_bytes)
        return f"{self.files} files, {size} of Python, {self.tokens / 1e6:.2f} M tokens of {self.vocab_size}, {how}"


def build_corpus(
    directory: str,
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    max_bytes: int = DEFAULT_MAX_BYTES,
    source: str | None = None,
) -> Corpus:
    """The corpus of the sources as they are now, built unless it is there. Makes it the directory's current one.

    `source` is a directory of Python files, by default the standard library of this interpreter; in the order of
    their paths each file is taken that still fits into `max_bytes`.
    Raises `NotFound`, `UsageError`, `NoSpace`, `PermissionDenied`.
    """
    if max_bytes < 1:
        raise UsageError(f"max_bytes={max_bytes}; the corpus needs at least 1 byte of text")
    disk = RealDisk()
    directory = os.path.abspath(directory)
    sources = _read_sources(disk, source or sysconfig.get_paths()["stdlib"], max_bytes)
    fingerprint = _fingerprint(sources, vocab_size)
    name = f"corpus-{fingerprint[:16]}"
    make_directories(disk, directory)
    with _locked(os.path.join(directory, _LOCK)):
        target = os.path.join(directory, name)
        corpus = _intact(disk, target, fingerprint)
        if corpus is None:
            _build(disk, directory, target, sources, fingerprint, vocab_size)
            corpus = msgspec.structs.replace(_describe(target), reused=False)
        replace_file(os.path.join(directory, _CURRENT), msgspec.json.encode(_Current(name)))
    return corpus


def open_corpus(directory: str) -> Corpus:
    """The directory's current corpus as it was built; also of a copy of the directory in 3FS, `ff://…`. Raises
    `NotFound` if none was, `DataCorruption`."""
    place = place_of(directory)
    path = place.below(_CURRENT)
    try:
        current = decode_json(read_whole(path, 4096), _Current)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{path.name}: {error}; remove the file, the corpus is then built again") from error
    if os.path.basename(current.name) != current.name or not current.name.startswith("corpus-"):
        raise DataCorruption(f"{path.name}: {current.name!r} is not a corpus; remove the file, and it is built again")
    return _describe(place.below(current.name).name)


def _read_sources(disk: Disk, source: str, max_bytes: int) -> list[tuple[str, bytes]]:
    """`(path below source, content)` in the order of the paths: each file that still fits into `max_bytes`."""
    sources: list[tuple[str, bytes]] = []
    room = max_bytes
    for path in _source_paths(source):
        size = os.path.getsize(os.path.join(source, path))
        if size <= min(room, _MAX_SOURCE_BYTES):
            sources.append((path, read_file(os.path.join(source, path), max_bytes=_MAX_SOURCE_BYTES, disk=disk)))
            room -= size
    if not sources:
        raise NotFound(
            f"no Python sources of at most {max_bytes} bytes under {source}; install the standard library's .py files "
            "(Debian: libpython3-stdlib), or name another source directory"
        )
    return sources


def _source_paths(source: str) -> list[str]:
    found: list[str] = []
    for parent, directories, names in os.walk(source):
        directories[:] = [name for name in directories if name not in _SKIPPED_DIRECTORIES]
        paths = (os.path.join(parent, name) for name in names if name.endswith(".py"))
        found += (os.path.relpath(path, source) for path in paths if os.path.isfile(path))
    return sorted(found)


def _fingerprint(sources: Sequence[tuple[str, bytes]], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{_ENCODING_VERSION} {vocab_size} {_TOKENIZER_SAMPLE_BYTES}".encode())
    for path, content in sources:
        digest.update(f"\n{len(content)} {path!r}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _build(
    disk: Disk, directory: str, target: str, sources: Sequence[tuple[str, bytes]], fingerprint: str, vocab_size: int
) -> None:
    """Everything under a hidden name, then the rename. The caller holds the lock, so what is in the way is debris."""
    started_ns = time.monotonic_ns()
    building = os.path.join(directory, _BUILDING)
    for debris in (building, target):
        _remove_directory(disk, debris)
    disk.mkdir(building)
    tokenizer = BpeTokenizer.train(_sample(sources), vocab_size)
    documents = [np.append(tokenizer.encode(content), np.uint16(END_OF_TEXT)) for _, content in sources]
    meta = _Meta(
        fingerprint=fingerprint,
        files=len(sources),
        source_bytes=sum(len(content) for _, content in sources),
        tokens=sum(map(len, documents)),
        vocab_size=tokenizer.vocab_size,
        build_ns=time.monotonic_ns() - started_ns,
    )
    tokenizer.save(os.path.join(building, _TOKENIZER))
    with RecordSetWriter(building, shard_bytes=_SHARD_BYTES, meta=msgspec.to_builtins(meta), disk=disk) as writer:
        for document in documents:
            writer.add(document.astype("<u2").tobytes())
    with contextlib.suppress(Exists):  # where locks do not work, another builder may have been first: equally good
        disk.rename(building, target)
    disk.sync_dir(directory)


def _sample(sources: Sequence[tuple[str, bytes]]) -> Iterator[bytes]:
    """The same share of every file, from its middle."""
    total = sum(len(content) for _, content in sources)
    for _, content in sources:
        wanted = min(len(content), len(content) * _TOKENIZER_SAMPLE_BYTES // total + 1)
        begin = (len(content) - wanted) // 2
        yield content[begin : begin + wanted]


def _intact(disk: Disk, target: str, fingerprint: str) -> Corpus | None:
    """The corpus at `target` if every byte of it is as it was written."""
    if not disk.is_dir(target):
        return None
    try:
        corpus = _describe(target)
        with corpus.records() as records:
            for _ in records:
                pass
        vocab_size = corpus.tokenizer().vocab_size
    except (DataCorruption, NotFound):
        return None
    return corpus if (corpus.fingerprint, corpus.vocab_size) == (fingerprint, vocab_size) else None


def _describe(target: str) -> Corpus:
    with RecordSet(target) as records:
        try:
            meta = convert(records.meta, _Meta)
        except msgspec.ValidationError as error:
            raise DataCorruption(f"{target}: not a corpus of ours ({error}); remove it, and build again") from error
    return Corpus(directory=target, reused=True, **msgspec.to_builtins(meta))


def _remove_directory(disk: Disk, path: str) -> None:
    if disk.is_dir(path):
        for name in disk.list(path):
            disk.remove(os.path.join(path, name))
        disk.rmdir(path)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Exclusive among processes; the kernel gives the lock back when its holder dies."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise translate_os_error(error, f"open {path}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            raise translate_os_error(error, f"lock {path}") from error
        yield
    finally:
        os.close(fd)
