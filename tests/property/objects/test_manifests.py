"""Whatever a manifest says: it is refused in one line, or what it makes on a node stays in its directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.manifest import (
    DirectoryEntry,
    Entry,
    FileEntry,
    LinkEntry,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from fireflyer.cluster.objects import NodeCache

NAMES = st.sampled_from(["a", "b", "c", "A", "..", ".", "", "é", "e\u0301", "-", "x\n", "~", "a b"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join).filter(bool)
TIDY = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
TARGETS = st.lists(st.sampled_from(["a", "b", "c", "..", "..", "."]), min_size=1, max_size=4).map("/".join)
MODES = st.sampled_from([0, 0o644, 0o755, 0o777])


def entries(paths: st.SearchStrategy[str]) -> st.SearchStrategy[list[Entry]]:
    one: st.SearchStrategy[Entry] = st.one_of(
        st.builds(FileEntry, paths, MODES, st.just(1), st.just(hash_of(b"x"))),
        st.builds(DirectoryEntry, paths, MODES),
        st.builds(LinkEntry, paths, TARGETS | st.just("/etc")),
    )
    return st.lists(one, max_size=6)


def with_parents(found: list[Entry]) -> list[Entry]:
    """Sorted, one entry for a path, and directories where some are missing: most of these are accepted."""
    by_path: dict[str, Entry] = {entry.path: entry for entry in found}
    for path in list(by_path):
        while path := path.rpartition("/")[0]:
            by_path[path] = DirectoryEntry(path, 0o755)
    return [by_path[path] for path in sorted(by_path)]


@settings(max_examples=150)
@given(found=entries(PATHS) | entries(TIDY).map(with_parents))
def test_what_is_accepted_stays_in_its_directory(found: list[Entry]) -> None:
    data = encode_manifest(Manifest(1, tuple(found)))
    refused = ""
    try:
        decode_manifest(data)
    except UsageError as error:
        refused = error.message
    event("refused" if refused else "accepted")
    if refused:
        assert "\n" not in refused
        return
    blobs = {hash_of(data): data, hash_of(b"x"): b"x"}
    with tempfile.TemporaryDirectory(prefix="ff-manifest-") as directory:
        root = os.path.join(directory, "deep", "run")
        os.mkdir(os.path.dirname(root))
        cache = NodeCache(os.path.join(directory, "cache"))
        cache.materialise(hash_of(data), root, lambda blob, _size: [blobs[blob]])
        assert os.listdir(os.path.dirname(root)) == ["run"]
        for entry in found:
            path = Path(root, entry.path)
            assert os.path.lexists(path)
            assert os.path.commonpath([os.path.realpath(path), os.path.realpath(root)]) == os.path.realpath(root)
            if type(entry) is FileEntry and not path.is_symlink():
                assert path.stat().st_mode & 0o7777 == entry.mode


_kinds = st.sampled_from(["file", "directory", "link"])
_values = st.recursive(
    st.integers(-5, 1 << 60) | st.text(max_size=8) | st.binary(max_size=8) | _kinds,
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
)
_messages = st.tuples(st.just("fireflyer-snapshot"), st.just(1), _values).map(msgspec.msgpack.encode)


@given(data=st.binary(max_size=200) | _messages)
def test_any_bytes_are_refused_in_one_line_or_are_canonical(data: bytes) -> None:
    refused = ""
    try:
        assert encode_manifest(decode_manifest(data)) == data
    except UsageError as error:
        refused = error.message
    assert "\n" not in refused
