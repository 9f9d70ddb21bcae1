"""Fixed-length samples for language models, cut from a data set of token records without copying it.

All records, one after another, are one long row of tokens; sample i is the window of `length` tokens that begins at
`i * length`, and its target is the same window one token later. Windows cross records; the last one that is not full
is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.data.recordset import RecordSet
from fireflyer.data.shard_reader import check_numbers

__all__ = ["TokenWindows"]

_TOKEN = np.dtype("<u2")


class TokenWindows:
    """`windows[i]` is `(input, target)`, int64 tensors `[length]` each. Thread-safe."""

    def __init__(self, records: RecordSet, length: int, *, vocab_size: int = 1 << 16) -> None:
        """`records` hold little-endian uint16 token ids below `vocab_size`. Raises `UsageError` if they are fewer than
        one window, `DataCorruption` if they cannot be tokens."""
        if length < 1:
            raise UsageError(f"length={length} tokens; a window needs at least 1")
        self.records = records
        self.length = length
        self.vocab_size = vocab_size
        lengths_bytes = records.lengths()
        odd = np.flatnonzero(lengths_bytes % _TOKEN.itemsize)
        if odd.size:
            raise DataCorruption(
                f"{records.path}: record {odd[0]} has an odd number of bytes, so it does not hold uint16 tokens"
            )
        self._ends = np.cumsum(lengths_bytes // _TOKEN.itemsize)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        if self.tokens <= length:
            raise UsageError(f"{records.path}: {self.tokens} tokens, one window of {length} needs {length + 1}")

    def __len__(self) -> int:
        return (self.tokens - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):  # a loop over all of them ends here, as over any sequence
            raise IndexError(f"{self.records.path}: window {index} is out of range; there are {len(self)}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The records of all these windows are read in one batch, each once. Raises `IndexError`, `DataCorruption`."""
        wanted = check_numbers(indices, len(self), f"{self.records.path}, windows") * self.length
        spans = [self._records_of(first, self.length + 1) for first in wanted.tolist()]
        numbers = sorted({record for span in spans for record in span})
        found = dict(zip(numbers, self.records.read_batch(numbers), strict=True))
        samples = []
        for first, span in zip(wanted.tolist(), spans, strict=True):
            tokens = torch.from_numpy(self._row(first, self.length + 1, [(at, found[at]) for at in span]))
            samples.append((tokens[:-1], tokens[1:]))
        return samples

    def _records_of(self, first: int, count: int) -> range:
        """Those with tokens of `[first, first + count)`."""
        begin, end = np.searchsorted(self._ends, [first, first + count - 1], side="right").tolist()
        return range(begin, end + 1)

    def _row(self, first: int, count: int, records: Sequence[tuple[int, memoryview]]) -> NDArray[np.int64]:
        """Tokens `[first, first + count)` of the long row, int64."""
        row = np.empty(count, np.int64)
        filled = 0
        for record, content in records:
            begin = int(self._ends[record - 1]) if record else 0
            piece = np.frombuffer(content, _TOKEN)[first + filled - begin :][: count - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
        if int(row.max()) >= self.vocab_size:
            raise DataCorruption(
                f"{self.records.path}: token {row.max()} near token {first} of the data set, the vocabulary has "
                f"{self.vocab_size}: these records were made with another tokenizer"
            )
        return row
