"""Fixed-length samples for language models, cut from a data set of token records without copying it.

All records, one after another, are one long row of tokens; sample i is the window of `length` tokens that begins at
`i * length`, and its target is the same window one token later. Windows cross records; the last one that is not full
is left out.

A record is read whole, as its checksum covers all of it: a window in a record of 500 MB reads 500 MB. Records of a few
MB at most are the ones to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.units import MIB
from fireflyer.data.read_plan import split_by_bytes
from fireflyer.data.recordset import RecordSet
from fireflyer.data.shard_reader import check_numbers

__all__ = ["TokenWindows"]

_TOKEN = np.dtype("<u2")
BATCH_BYTES: Final = 64 * MIB
"""Of records that are in memory at once; more only for a single record that is larger."""


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
        """The records of all these windows are read together, each once, but no more than `BATCH_BYTES` of them at a
        time. Raises `IndexError`, `DataCorruption`."""
        wanted = check_numbers(indices, len(self), f"{self.records.path}, windows") * self.length
        firsts = wanted.tolist()
        rows = [np.empty(self.length + 1, np.int64) for _ in firsts]
        begins = np.searchsorted(self._ends, wanted, side="right").tolist()
        ends = np.searchsorted(self._ends, wanted + self.length, side="right").tolist()
        pieces = sorted((record, at) for at in range(len(firsts)) for record in range(begins[at], ends[at] + 1))
        numbers = np.unique(np.array([record for record, _ in pieces], np.int64))
        done = 0
        for begin, end in split_by_bytes(self._lengths_of(numbers), BATCH_BYTES, len(numbers)):
            found = dict(zip(numbers[begin:end].tolist(), self.records.read_batch(numbers[begin:end]), strict=True))
            while done < len(pieces) and pieces[done][0] in found:
                record, at = pieces[done]
                self._put(rows[at], firsts[at], record, found[record])
                done += 1
        return [self._sample(row, first) for row, first in zip(rows, firsts, strict=True)]

    def _lengths_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """In bytes."""
        begins = np.where(numbers > 0, self._ends[numbers - 1], 0)
        return (self._ends[numbers] - begins) * _TOKEN.itemsize

    def _put(self, row: NDArray[np.int64], first: int, record: int, content: memoryview) -> None:
        """What a record has of the tokens from `first` on, into the row of them."""
        offset = int(self._ends[record - 1] if record else 0) - first
        tokens = np.frombuffer(content, _TOKEN)[max(0, -offset) : len(row) - offset]
        row[max(0, offset) :][: len(tokens)] = tokens

    def _sample(self, row: NDArray[np.int64], first: int) -> tuple[torch.Tensor, torch.Tensor]:
        if int(row.max()) >= self.vocab_size:
            raise DataCorruption(
                f"{self.records.path}: token {row.max()} near token {first} of the data set, the vocabulary has "
                f"{self.vocab_size}: these records were made with another tokenizer"
            )
        tokens = torch.from_numpy(row)
        return tokens[:-1], tokens[1:]
