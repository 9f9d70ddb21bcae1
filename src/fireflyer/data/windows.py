"""Fixed-length samples for language models, cut from a data set of token records without copying it.

All records, one after another, are one long row of tokens; sample i is the window of `length` tokens that begins at
`i * length`, and its target is the same window one token later. Windows cross records; the last one that is not full
is left out.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.data.recordset import RecordSet

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
                f"{records.directory}: record {odd[0]} has an odd number of bytes, so it does not hold uint16 tokens"
            )
        self._ends = np.cumsum(lengths_bytes // _TOKEN.itemsize)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        if self.tokens <= length:
            raise UsageError(f"{records.directory}: {self.tokens} tokens, one window of {length} needs {length + 1}")

    def __len__(self) -> int:
        return (self.tokens - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.records.directory}: window {index} is out of range; there are {len(self)}")
        tokens = torch.from_numpy(self._row(index * self.length, self.length + 1))
        return tokens[:-1], tokens[1:]

    def _row(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens `[first, first + count)` of the long row, int64."""
        row = np.empty(count, np.int64)
        filled = 0
        record = int(np.searchsorted(self._ends, first, side="right"))
        while filled < count:
            begin = int(self._ends[record - 1]) if record else 0
            piece = self.records.array(record, _TOKEN)[first + filled - begin :][: count - filled]
            row[filled : filled + len(piece)] = piece
            filled += len(piece)
            record += 1
        if int(row.max()) >= self.vocab_size:
            raise DataCorruption(
                f"{self.records.directory}: token {row.max()} near token {first} of the data set, the vocabulary has "
                f"{self.vocab_size}: these records were made with another tokenizer"
            )
        return row
