"""Which manifests are refused, each in one line that says what to do."""

from __future__ import annotations

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.manifest import (
    DirectoryEntry,
    Entry,
    FileEntry,
    LinkEntry,
    Manifest,
    ManifestLimits,
    blobs_of,
    decode_manifest,
    encode_manifest,
    files_by_blob,
    make_manifest,
)

BLOB = hash_of(b"x")
OTHER = hash_of(b"yy")


def file(path: str, size_bytes: int = 1, blob: str = BLOB) -> FileEntry:
    return FileEntry(path, 0o644, size_bytes, blob)


def folder(path: str) -> DirectoryEntry:
    return DirectoryEntry(path, 0o755)


def refused(*entries: Entry, limits: ManifestLimits | None = None) -> str:
    """Of the bytes, as a hostile client would send them."""
    data = encode_manifest(Manifest(1, entries))
    with pytest.raises(UsageError) as raised:
        decode_manifest(data, limits or ManifestLimits())
    assert "\n" not in raised.value.message
    return raised.value.message


def test_the_same_files_in_any_order_make_the_same_bytes() -> None:
    entries: list[Entry] = [folder("a"), file("a/b"), LinkEntry("c", "a/b"), file("d", 2, OTHER)]
    one = encode_manifest(make_manifest(entries))
    assert one == encode_manifest(make_manifest(reversed(entries)))
    manifest = decode_manifest(one)
    assert [entry.path for entry in manifest.entries] == ["a", "a/b", "c", "d"]
    assert blobs_of(manifest) == {BLOB: 1, OTHER: 2}
    assert files_by_blob(manifest)[OTHER].path == "d"
    assert manifest.size_bytes == 3


@pytest.mark.parametrize("path", ["/etc/passwd", "/", "//x"])
def test_an_absolute_path_is_refused(path: str) -> None:
    assert "is absolute" in refused(file(path))


@pytest.mark.parametrize("path", ["..", "../x", "a/../../x", ".", "./x", "a/./x", "a//x", "a/"])
def test_a_path_that_leaves_the_directory_or_has_two_forms_is_refused(path: str) -> None:
    assert "an empty component, '.' or '..'" in refused(folder("a"), file(path)) or path < "a"
    with pytest.raises(UsageError):
        make_manifest([folder("a"), file(path)])


@pytest.mark.parametrize("path", ["a\0b", "a\nb", "a\x1b[2Jb", "a\x7f"])
def test_control_characters_are_refused(path: str) -> None:
    assert "control character" in refused(file(path))


def test_long_paths_and_names_are_refused() -> None:
    assert "longer than 255 bytes" in refused(file("x" * 256))
    assert "longer than 1024 bytes" in refused(file("é" * 700))
    assert "cannot be decoded" in refused(file("x/" * 600 + "x"))


def test_a_path_that_is_there_twice_is_refused() -> None:
    assert "is there twice" in refused(file("a"), file("a"))
    assert "is there twice" in refused(folder("a"), LinkEntry("a", "b"))


def test_entries_that_are_not_sorted_are_refused() -> None:
    assert "sorted by path" in refused(file("b"), file("a"))


@pytest.mark.parametrize("paths", [("A", "a"), ("Straße", "straSSE"), ("e\u0301", "\u00e9"), ("x/Y", "x/y")])
def test_paths_that_only_differ_in_case_or_accents_are_refused(paths: tuple[str, str]) -> None:
    unsorted: list[Entry] = [*map(file, paths), folder("x")]
    entries = sorted(unsorted, key=lambda entry: entry.path.encode())
    assert "only differ in case or accents" in refused(*entries)


def test_what_lies_below_a_link_or_a_file_is_refused() -> None:
    assert "no directory of the snapshot" in refused(LinkEntry("a", "b"), file("a/x"))
    assert "no directory of the snapshot" in refused(file("a"), file("a/x"))
    assert "no directory of the snapshot" in refused(file("a/x"))


@pytest.mark.parametrize("target", ["/etc", "..", "../x", "b/../..", "./.././x"])
def test_a_link_that_leads_out_is_refused(target: str) -> None:
    assert "leads out of the directory" in refused(LinkEntry("a", target))


def test_a_link_that_leads_out_through_another_link_is_refused() -> None:
    """`down/here` is `down`, so `..` from there is the top, and the next one is outside."""
    inside = (folder("down"), LinkEntry("down/here", "."))
    assert "leads out" in refused(*inside, LinkEntry("out", "down/here/../.."))
    decode_manifest(encode_manifest(Manifest(1, (*inside, LinkEntry("out", "down/here/..")))))


def test_a_link_may_lead_to_nothing_and_up_within_the_directory() -> None:
    decode_manifest(encode_manifest(Manifest(1, (folder("a"), LinkEntry("a/up", "../b"), LinkEntry("c", "none/x")))))


def test_links_in_a_circle_are_refused() -> None:
    assert "too many links" in refused(LinkEntry("a", "b"), LinkEntry("b", "a"))
    assert "too many links" in refused(LinkEntry("a", "a/a/a/a"))


def test_there_are_no_devices_and_no_setuid_bits() -> None:
    for entry in (["device", "null", 1, 3], ["file", "a", 0o4755, 1, BLOB], ["file", "a", 0o644, -1, BLOB]):
        data = msgspec.msgpack.encode(["fireflyer-snapshot", 1, [entry]])
        with pytest.raises(UsageError, match="cannot be decoded"):
            decode_manifest(data)


def test_what_is_too_much_is_refused() -> None:
    limits = ManifestLimits(entries=2, file_bytes=10, total_bytes=15)
    assert "3 entries; 2 are allowed" in refused(file("a"), file("b"), file("c"), limits=limits)
    assert "'a' has 11 B; 10 B are allowed" in refused(file("a", 11), limits=limits)
    assert "the snapshot has 18 B" in refused(file("a", 9), file("b", 9), limits=limits)


def test_one_hash_with_two_sizes_is_refused() -> None:
    assert "another size" in refused(file("a", 1), file("b", 2))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93" * 5000, b"\xdd\xff\xff\xff\xff", b"x" * 1000])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="cannot be decoded"):
        decode_manifest(data)


def test_bytes_in_another_form_are_refused() -> None:
    """Else one directory could have many names, and a name could mean several."""
    data = encode_manifest(make_manifest([file("a")]))
    entries = [["file", "a", 0o644, 1, BLOB, "more"]]  # of a later release
    longer = msgspec.msgpack.encode(["fireflyer-snapshot", 1, entries])
    decode_manifest(data)
    with pytest.raises(UsageError, match=r"canonical|decoded"):
        decode_manifest(longer)


def test_a_later_version_is_refused() -> None:
    with pytest.raises(UsageError, match="submit with the same release"):
        decode_manifest(msgspec.msgpack.encode(["fireflyer-snapshot", 2, []]))
