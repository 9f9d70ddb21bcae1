"""Ids of the chunk store: their order is that of their bytes, and bytes that no id has are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.fs.schema.ids import ChunkId, ContentId

CHUNKS = st.builds(ChunkId, st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 32) - 1))


@given(CHUNKS, CHUNKS)
def test_the_order_of_chunks_is_the_order_of_their_bytes(left: ChunkId, right: ChunkId) -> None:
    assert (left < right) == (left.to_bytes() < right.to_bytes())
    assert ChunkId.from_bytes(left.to_bytes()) == left


@pytest.mark.parametrize("data", [b"", b"\0" * 15, b"\0" * 17, b"\x80" + b"\0" * 15, b"\0" * 8 + b"\1" + b"\0" * 7])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="is not the id of a chunk"):
        ChunkId.from_bytes(data)


def test_content_made_in_a_later_chain_version_is_newer() -> None:
    assert ContentId(1, 9) < ContentId(2, 1) < ContentId(2, 2)
