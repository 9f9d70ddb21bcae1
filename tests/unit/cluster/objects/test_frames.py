"""Blobs one behind another in one stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.frames import frame_header, read_frames
from fireflyer.cluster.core.objects.manifest import FileEntry
from fireflyer.cluster.sending import batches

BLOBS = st.lists(st.binary(max_size=50), max_size=5)


def stream_of(blobs: list[bytes]) -> bytes:
    return b"".join(frame_header(hash_of(blob), len(blob)) + blob for blob in blobs)


def cut(stream: bytes, size: int) -> list[bytes]:
    return [stream[at : at + size] for at in range(0, len(stream), size)]


def read_all(pieces: list[bytes]) -> list[tuple[str, bytes]]:
    return [(frame.blob, b"".join(frame.pieces)) for frame in read_frames(pieces)]


@given(blobs=BLOBS, size=st.integers(1, 200))
def test_what_was_framed_is_read_however_the_stream_is_cut(blobs: list[bytes], size: int) -> None:
    assert read_all([b"", *cut(stream_of(blobs), size), b""]) == [(hash_of(blob), blob) for blob in blobs]


@given(blobs=BLOBS.filter(bool), size=st.integers(1, 200), data=st.data())
def test_a_stream_that_ends_inside_a_frame_is_refused(blobs: list[bytes], size: int, data: st.DataObject) -> None:
    stream = stream_of(blobs)
    ends = {0}
    for blob in blobs:
        ends.add(max(ends) + 40 + len(blob))
    length = data.draw(st.integers(1, len(stream) - 1).filter(lambda at: at not in ends))
    with pytest.raises(UsageError, match="send them again"):
        read_all(cut(stream[:length], size))


def test_a_blob_that_is_not_read_to_its_end_is_an_error() -> None:
    with pytest.raises(UsageError, match="not that of the manifest"):
        list(read_frames([stream_of([b"some bytes"])]))


def test_batches_are_bounded_by_bytes_and_by_blobs_and_lose_nothing() -> None:
    sizes = [5, 5, 1, 20, 1, 1, 1, 1]
    files = {f"{at:064x}": FileEntry(f"f{at}", 0o600, size, f"{at:064x}") for at, size in enumerate(sizes)}
    found = [[entry.size_bytes for entry in batch] for batch in batches(files, max_bytes=10, max_blobs=3)]
    assert found == [[5, 5], [1], [20], [1, 1, 1], [1]]
