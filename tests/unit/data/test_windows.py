"""Token windows are one long row of tokens cut evenly, wherever records and shards end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.data import RecordSet, RecordSetWriter, TokenWindows
from fireflyer.data import windows as windows_module


def token_set(directory: Path, documents: list[list[int]]) -> RecordSet:
    directory.mkdir()
    with RecordSetWriter(str(directory), shard_bytes=256) as writer:
        for document in documents:
            writer.add(np.array(document, "<u2").tobytes())
    return RecordSet(str(directory))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12), length=st.integers(1, 20))
def test_the_windows_cover_the_row_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int
) -> None:
    row = np.arange(sum(sizes))
    documents = [part.tolist() for part in np.split(row, np.cumsum(sizes)[:-1])]
    records = token_set(tmp_path_factory.mktemp("tokens") / "set", documents)
    if len(row) <= length:
        with pytest.raises(UsageError, match=f"one window of {length} needs {length + 1}"):
            TokenWindows(records, length)
        return
    windows = TokenWindows(records, length)
    assert (windows.tokens, len(windows)) == (len(row), (len(row) - 1) // length)
    for index in range(len(windows)):
        tokens, targets = windows[index]
        assert (tokens.dtype, targets.dtype) == (torch.int64, torch.int64)
        assert tokens.tolist() == row[index * length : (index + 1) * length].tolist()
        assert targets.tolist() == (tokens + 1).tolist()
    for index in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows[index]


def test_a_batch_of_windows_has_few_records_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the records are of which each window takes a small part."""
    row = np.arange(40 * 60) % 60_000
    records = token_set(tmp_path / "set", [part.tolist() for part in np.split(row, 40)])
    windows = TokenWindows(records, 7)
    read: list[int] = []
    real = RecordSet.read_batch

    def counted(self: RecordSet, indices: Any) -> list[memoryview]:
        found = real(self, indices)
        read.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(RecordSet, "read_batch", counted)
    monkeypatch.setattr(windows_module, "BATCH_BYTES", 300)
    wanted = np.random.default_rng(1).permutation(len(windows)).tolist()
    wanted = [*wanted, wanted[0]]
    found = windows.__getitems__(wanted)
    assert max(read) <= 300
    assert sum(read) == 2 * len(row)
    assert [tokens.tolist() for tokens, _ in found] == [row[at * 7 :][:7].tolist() for at in wanted]
    assert [targets.tolist() for _, targets in found] == [row[at * 7 + 1 :][:7].tolist() for at in wanted]


def test_tokens_of_another_vocabulary_are_named(tmp_path: Path) -> None:
    windows = TokenWindows(token_set(tmp_path / "set", [[1, 2, 3], [4, 99, 5]]), 2, vocab_size=50)
    assert windows[0][0].tolist() == [1, 2]
    with pytest.raises(DataCorruption, match=r"token 99 .* another tokenizer"):
        windows[1]


def test_records_that_hold_no_tokens_are_named(tmp_path: Path) -> None:
    with RecordSetWriter(str(tmp_path)) as writer:
        writer.add(b"ab")
        writer.add(b"abc")
    with pytest.raises(DataCorruption, match="record 1 has an odd number of bytes"):
        TokenWindows(RecordSet(str(tmp_path)), 1)
