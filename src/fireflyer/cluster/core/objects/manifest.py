"""Manifest of a snapshot: paths, modes, sizes and hashes of a directory. Pure.

A snapshot is named by the hash of its manifest's bytes, so the same files must always give the same bytes: entries are
sorted by path, and `decode_manifest` refuses bytes that `encode_manifest` would not have made. Times and owners are not
in it. All directories are, from which follows that nothing lies below a link.

Who decodes a manifest trusts nobody: `decode_manifest` refuses paths that lead out of the directory, two entries of one
path or of paths that only differ in case, links out of it (followed through the links of the manifest itself), and what
is larger than `ManifestLimits`. A manifest cannot describe devices, fifos or sockets, nor setuid bits.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, msgpack_decoder
from fireflyer.base.errors import UsageError
from fireflyer.base.units import GIB, MIB, format_bytes
from fireflyer.cluster.core.objects.blobs import BlobHash

__all__ = [
    "MANIFEST_LIMITS",
    "MAX_MANIFEST_BYTES",
    "DirectoryEntry",
    "Entry",
    "FileEntry",
    "LinkEntry",
    "Manifest",
    "ManifestLimits",
    "blobs_of",
    "check_path",
    "decode_manifest",
    "encode_manifest",
    "files_by_blob",
    "make_manifest",
]

MAX_MANIFEST_BYTES: Final = 64 * MIB
MAX_ENTRIES: Final = 200_000
MAX_PATH_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 255
MAX_LINKS_FOLLOWED: Final = 40

_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_BYTES)]
_Mode = Annotated[int, msgspec.Meta(ge=0, le=0o777)]


class FileEntry(msgspec.Struct, frozen=True, array_like=True, tag="file"):
    path: _Path
    mode: _Mode
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
    blob: BlobHash


class DirectoryEntry(msgspec.Struct, frozen=True, array_like=True, tag="directory"):
    path: _Path
    mode: _Mode


class LinkEntry(msgspec.Struct, frozen=True, array_like=True, tag="link"):
    path: _Path
    target: _Path


Entry = FileEntry | DirectoryEntry | LinkEntry


class Manifest(msgspec.Struct, frozen=True, array_like=True, tag="fireflyer-snapshot"):
    version: Literal[1]
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries if type(entry) is FileEntry)


class ManifestLimits(NamedTuple):
    entries: int = MAX_ENTRIES
    file_bytes: int = 16 * GIB
    total_bytes: int = 64 * GIB


MANIFEST_LIMITS: Final = ManifestLimits()
_DECODER: Final = msgpack_decoder(Manifest)
_ENCODER: Final = msgspec.msgpack.Encoder()


def make_manifest(entries: Iterable[Entry], limits: ManifestLimits = MANIFEST_LIMITS) -> Manifest:
    """Sorted and checked. Raises `UsageError`."""
    manifest = Manifest(1, tuple(sorted(entries, key=_sort_key)))
    _check(manifest, limits)
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    return _ENCODER.encode(manifest)


def decode_manifest(data: bytes, limits: ManifestLimits = MANIFEST_LIMITS) -> Manifest:
    """Raises `UsageError`, in one line, for every manifest that `make_manifest` and `encode_manifest` do not make."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise UsageError(f"the manifest has {len(data)} bytes; {MAX_MANIFEST_BYTES} are allowed: ignore some files")
    try:
        manifest = _DECODER.decode(data)
    except DECODE_ERRORS as error:
        raise UsageError(f"the manifest cannot be decoded ({error}); submit with the same release") from None
    _check(manifest, limits)
    if encode_manifest(manifest) != data:
        raise UsageError("the manifest is not in its canonical form; submit with the same release")
    return manifest


def blobs_of(manifest: Manifest) -> dict[str, int]:
    """Sizes of the blobs, by name."""
    return {entry.blob: entry.size_bytes for entry in manifest.entries if type(entry) is FileEntry}


def files_by_blob(manifest: Manifest) -> dict[str, FileEntry]:
    """A file that has each blob: where who sends it finds the bytes."""
    return {entry.blob: entry for entry in manifest.entries if type(entry) is FileEntry}


def _sort_key(entry: Entry) -> bytes:
    return entry.path.encode("utf-8", "surrogatepass")


def check_path(path: str) -> None:
    """That `path` names something in the directory, in one way only. Raises `UsageError`."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the name {path!r} is not UTF-8; rename the file or ignore it") from None
    if len(encoded) > MAX_PATH_BYTES:
        raise UsageError(f"the path {path[:80]!r}… is longer than {MAX_PATH_BYTES} bytes; rename or ignore it")
    if not path.isprintable() and any(unicodedata.category(one) == "Cc" for one in path):
        raise UsageError(f"the path {path!r} has a control character; rename the file or ignore it")
    if len(encoded) > MAX_NAME_BYTES and max(len(name.encode()) for name in path.split("/")) > MAX_NAME_BYTES:
        raise UsageError(f"a name in {path[:80]!r}… is longer than {MAX_NAME_BYTES} bytes; rename or ignore it")
    if path.startswith("/"):
        raise UsageError(f"the path {path!r} is absolute; paths are relative to the directory")
    inside = f"/{path}/"
    if "//" in inside or "/./" in inside or "/../" in inside:
        raise UsageError(f"the path {path!r} has an empty component, '.' or '..'; write it without them")


def _check(manifest: Manifest, limits: ManifestLimits) -> None:
    if len(manifest.entries) > limits.entries:
        raise UsageError(
            f"the snapshot has {len(manifest.entries)} entries; {limits.entries} are allowed: ignore some in .ffignore"
        )
    by_path = _checked_paths(manifest.entries)
    _check_sizes(manifest.entries, limits)
    for entry in manifest.entries:
        if type(entry) is LinkEntry:
            _check_link(entry, by_path)


def _checked_paths(entries: tuple[Entry, ...]) -> dict[str, Entry]:
    by_path: dict[str, Entry] = {}
    folded: dict[str, str] = {}
    before = b""
    for entry in entries:
        path = entry.path
        check_path(path)
        encoded = path.encode()
        if encoded <= before:
            what = "is there twice" if encoded == before else "is not in its place: entries are sorted by path"
            raise UsageError(f"the path {path!r} {what}")
        before = encoded
        key = path.casefold() if path.isascii() else unicodedata.normalize("NFC", path).casefold()
        other = folded.setdefault(key, path)
        if other is not path:
            raise UsageError(f"the paths {other!r} and {path!r} only differ in case or accents; rename or ignore one")
        parent = path.rpartition("/")[0]
        if parent and type(by_path.get(parent)) is not DirectoryEntry:
            raise UsageError(f"the path {path!r} is in {parent!r}, which is no directory of the snapshot")
        by_path[path] = entry
    return by_path


def _check_sizes(entries: tuple[Entry, ...], limits: ManifestLimits) -> None:
    total_bytes = 0
    sizes: dict[str, int] = {}
    for entry in entries:
        if type(entry) is not FileEntry:
            continue
        if entry.size_bytes > limits.file_bytes:
            allowed = format_bytes(limits.file_bytes)
            raise UsageError(
                f"{entry.path!r} has {format_bytes(entry.size_bytes)}; {allowed} are allowed: put data into a shared "
                "file system and ignore the file in .ffignore"
            )
        if sizes.setdefault(entry.blob, entry.size_bytes) != entry.size_bytes:
            raise UsageError(f"{entry.path!r} has the hash of another file, and another size")
        total_bytes += entry.size_bytes
    if total_bytes > limits.total_bytes:
        raise UsageError(
            f"the snapshot has {format_bytes(total_bytes)}; {format_bytes(limits.total_bytes)} are allowed: ignore "
            "some files in .ffignore"
        )


def _check_link(link: LinkEntry, by_path: dict[str, Entry]) -> None:
    """Follows it, and the links on its way, as the kernel would."""
    at: list[str] = link.path.split("/")[:-1]
    ahead = _components(link, link.target)
    followed = 1
    while ahead:
        name = ahead.pop()
        if name == "..":
            if not at:
                raise _leaves(link)
            at.pop()
            continue
        entry = by_path.get("/".join((*at, name)))
        if type(entry) is not LinkEntry:
            at.append(name)
            continue
        followed += 1
        if followed > MAX_LINKS_FOLLOWED or len(ahead) > MAX_PATH_BYTES:
            raise UsageError(f"the link {link.path!r} leads through too many links; ignore it in .ffignore")
        ahead += _components(link, entry.target)


def _components(link: LinkEntry, target: str) -> list[str]:
    """Of the target of a link, the last one first."""
    try:
        long = len(target.encode()) > MAX_PATH_BYTES
    except UnicodeEncodeError:
        long = True
    if long or "\0" in target:
        raise UsageError(f"the target of the link {link.path!r} is too long or not UTF-8; ignore it in .ffignore")
    if target.startswith("/"):
        raise _leaves(link)
    return [name for name in reversed(target.split("/")) if name not in ("", ".")]


def _leaves(link: LinkEntry) -> UsageError:
    return UsageError(
        f"the link {link.path!r} leads out of the directory (to {link.target!r}); ignore it in .ffignore, and give the "
        "script the path as an argument"
    )
