"""Byte-level byte-pair encoding: text to token ids and back, exactly, for any bytes.

Text is cut into *words* by one regular expression over bytes (an optional space with letters, up to three digits,
punctuation, or white space); merges never cross a word. The vocabulary is

    0 … 255         the bytes themselves, so that everything can be encoded
    256             END_OF_TEXT: put between documents by who joins them; stands for no bytes, `encode` never makes it
    257 + k         merge k: the pair of earlier tokens that was the most frequent one when it was learned

Ids fit into uint16. Encoding is a table look-up for each word that was seen before. Training counts the words of a
sample once and then keeps the pair counts up to date, so it is quick and depends on nothing but its input: of equally
frequent pairs the one with the smaller ids is merged first.

File: JSON `{"format": "fireflyer-bpe", "version": 1, "crc32c": n, "merges": [[left, right], …]}`; n is that of the
merges as pairs of little-endian uint16.
(Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016; bytes as in GPT-2.)
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.ports import Disk
from fireflyer.data.files import read_file, replace_file
from fireflyer.native import crc32c

__all__ = ["END_OF_TEXT", "MAX_VOCABULARY", "BpeTokenizer", "ByteTokenizer"]

END_OF_TEXT = 256
MAX_VOCABULARY = 1 << 16
_FIRST_MERGE = END_OF_TEXT + 1
_MAX_FILE_BYTES = 4 << 20
_MAX_CACHED_WORDS = 1 << 18

# Bounded repeats: merging a word takes time quadratic in its length, and input may be one long run of anything.
_WORD = re.compile(rb" ?[A-Za-z_\x80-\xff]{1,40}| ?[0-9]{1,3}| ?[^\sA-Za-z0-9_\x80-\xff]{1,40}|\s{1,40}(?!\S)|\s{1,40}")
_LONGEST = 64
"""No word, with the byte behind it that decides where it ends, is longer."""
_PIECE_BYTES = 1 << 16

Pair = tuple[int, int]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    crc32c: int
    merges: list[tuple[int, int]]


class _WordCache(dict[bytes, bytes]):
    """Word to its ids as little-endian uint16; starts afresh when it has grown too large."""

    def __init__(self, ranks: dict[Pair, int]) -> None:
        super().__init__()
        self._ranks = ranks

    def __missing__(self, word: bytes) -> bytes:
        if len(self) >= _MAX_CACHED_WORDS:
            self.clear()
        encoded = np.array(_merge_word(list(word), self._ranks), dtype="<u2").tobytes()
        self[word] = encoded
        return encoded


class BpeTokenizer:
    """A vocabulary of bytes and learned merges. Immutable; may be used by several threads."""

    def __init__(self, merges: Sequence[Pair] = ()) -> None:
        """`merges[k]` is the pair that token `257 + k` stands for. Raises `UsageError` where it refers ahead."""
        if len(merges) > MAX_VOCABULARY - _FIRST_MERGE:
            raise UsageError(f"{len(merges)} merges; at most {MAX_VOCABULARY - _FIRST_MERGE} fit into uint16 ids")
        self._ranks: dict[Pair, int] = {}
        self._bytes: list[bytes] = [bytes([value]) for value in range(256)] + [b""]
        for token, (left, right) in enumerate(merges, start=_FIRST_MERGE):
            if not (0 <= left < token and 0 <= right < token) or END_OF_TEXT in (left, right):
                raise UsageError(f"merge {token - _FIRST_MERGE} joins tokens {left} and {right}, not two earlier ones")
            if (left, right) in self._ranks:
                raise UsageError(f"merge {token - _FIRST_MERGE} repeats the pair {left}, {right}")
            self._ranks[left, right] = token
            self._bytes.append(self._bytes[left] + self._bytes[right])
            if len(self._bytes[-1]) > 64:
                raise UsageError(f"merge {token - _FIRST_MERGE} makes a token of more than 64 bytes, longer than words")
        self._cache = _WordCache(self._ranks)

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def merges(self) -> list[Pair]:
        return list(self._ranks)

    @classmethod
    def train(cls, texts: Iterable[str | bytes], vocab_size: int) -> BpeTokenizer:
        """Learns up to `vocab_size - 257` merges from `texts`; fewer if no pair is left that occurs twice."""
        if not _FIRST_MERGE <= vocab_size <= MAX_VOCABULARY:
            raise UsageError(f"vocab_size={vocab_size}; it must be {_FIRST_MERGE} to {MAX_VOCABULARY}")
        words: Counter[bytes] = Counter()
        for text in texts:
            for some in _words(_as_bytes(text)):
                words.update(some)
        return cls(_learn_merges(words, vocab_size - _FIRST_MERGE))

    def encode(self, text: str | bytes) -> NDArray[np.uint16]:
        """Token ids of `text`, uint16 `[n]`."""
        pieces = [b"".join(map(self._cache.__getitem__, words)) for words in _words(_as_bytes(text))]
        return np.frombuffer(b"".join(pieces), dtype="<u2").astype(np.uint16, copy=False)

    def decode(self, ids: ArrayLike) -> bytes:
        """The bytes that `ids` (integers `[n]`) stand for: exactly the input of `encode`. Raises `UsageError`."""
        array = _checked_ids(ids, self.vocab_size)
        return b"".join(map(self._bytes.__getitem__, array.tolist()))

    def decode_text(self, ids: ArrayLike) -> str:
        """Decode to text for people: bytes that are not UTF-8 (half a character at the cut) become U+FFFD."""
        return self.decode(ids).decode("utf-8", errors="replace")

    def to_json(self) -> bytes:
        return msgspec.json.encode(_File("fireflyer-bpe", 1, _checksum(self.merges), self.merges))

    @classmethod
    def from_json(cls, data: bytes, *, name: str = "tokenizer") -> BpeTokenizer:
        """Raises `DataCorruption` naming `name` where `data` is not what `to_json` wrote."""
        try:
            file = decode_json(data, _File)
            if file.format != "fireflyer-bpe" or file.version != 1:
                raise UsageError(f"format {file.format!r} version {file.version} is not 'fireflyer-bpe' version 1")
            tokenizer = cls(file.merges)
            if file.crc32c != _checksum(file.merges):
                raise UsageError("the merges do not match their CRC32C")
            return tokenizer
        except (*DECODE_ERRORS, UsageError) as error:
            raise DataCorruption(f"{name}: not a tokenizer: {error}; train it again or restore the file") from error

    def save(self, path: str, *, disk: Disk | None = None) -> None:
        """Atomic: an existing file is replaced as a whole or not at all."""
        replace_file(path, self.to_json(), disk=disk)

    @classmethod
    def load(cls, path: str, *, disk: Disk | None = None) -> BpeTokenizer:
        """Raises `NotFound`, `DataCorruption`."""
        return cls.from_json(read_file(path, max_bytes=_MAX_FILE_BYTES, disk=disk), name=path)


class ByteTokenizer(BpeTokenizer):
    """No merges: every byte is its own token (and 256 still ends a document)."""

    def __init__(self) -> None:
        super().__init__(())

    def encode(self, text: str | bytes) -> NDArray[np.uint16]:
        return np.frombuffer(_as_bytes(text), dtype=np.uint8).astype(np.uint16)


def _words(text: bytes) -> Iterator[list[bytes]]:
    """All of them, some at a time: objects of Python for all words of a text would take 20 times its memory."""
    begin = 0
    while begin < len(text):
        end = min(begin + _PIECE_BYTES, len(text))
        words = _WORD.findall(text, begin, end)
        begin = end
        while end < len(text) and begin > end - _LONGEST:  # the cut may have made these end where they do not
            begin -= len(words.pop())
        yield words


def _as_bytes(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"text cannot be encoded as UTF-8: {error.reason} at character {error.start}") from None


def _checked_ids(ids: ArrayLike, vocab_size: int) -> NDArray[np.int64]:
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"token ids have dtype {array.dtype} and shape {list(array.shape)}; a list of integers is needed"
        )
    if int(array.min()) < 0 or int(array.max()) >= vocab_size:
        raise UsageError(f"token ids {array.min()} to {array.max()}; this vocabulary has 0 to {vocab_size - 1}")
    return array.astype(np.int64)


def _checksum(merges: Sequence[Pair]) -> int:
    return crc32c(np.array(merges, "<u2").tobytes())


def _merge_word(symbols: list[int], ranks: dict[Pair, int]) -> list[int]:
    """Applies the merges to one word in the order in which they were learned."""
    while len(symbols) > 1:
        tokens = [ranks.get(pair, MAX_VOCABULARY) for pair in pairwise(symbols)]
        first = min(tokens)
        if first == MAX_VOCABULARY:
            break
        at = tokens.index(first)
        symbols = _replace_pair(symbols, (symbols[at], symbols[at + 1]), first)
    return symbols


def _replace_pair(symbols: list[int], pair: Pair, token: int) -> list[int]:
    """`symbols` with every occurrence of `pair`, from the left, replaced by `token`."""
    left, right = pair
    merged: list[int] = []
    at = 0
    while at < len(symbols):
        if symbols[at] == left and at + 1 < len(symbols) and symbols[at + 1] == right:
            merged.append(token)
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return merged


class _PairCounts:
    """How often each pair occurs in all words, which words hold it, and the most frequent one."""

    def __init__(self) -> None:
        self.counts: defaultdict[Pair, int] = defaultdict(int)
        self.words: defaultdict[Pair, set[int]] = defaultdict(set)
        self._heap: list[tuple[int, Pair]] = []

    def add(self, symbols: list[int], word: int, count: int) -> None:
        """A word came (`count` > 0) or went (`count` < 0). `words` may go on listing a word that lost the pair."""
        for pair in pairwise(symbols):
            self.counts[pair] += count
            if count > 0:
                self.words[pair].add(word)

    def push(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            heapq.heappush(self._heap, (-self.counts[pair], pair))

    def pop_most_frequent(self) -> Pair | None:
        """None when no pair occurs twice. Entries whose count has changed since are passed over: a newer one exists."""
        while self._heap:
            negative, pair = heapq.heappop(self._heap)
            if -negative == self.counts[pair]:
                return pair if -negative >= 2 else None
        return None


def _learn_merges(words: Counter[bytes], limit: int) -> list[Pair]:
    symbols = [list(word) for word in sorted(words)]
    counts = [words[word] for word in sorted(words)]
    pairs = _PairCounts()
    for index, word in enumerate(symbols):
        pairs.add(word, index, counts[index])
    pairs.push(pairs.counts)
    merges: list[Pair] = []
    while len(merges) < limit:
        best = pairs.pop_most_frequent()
        if best is None:
            break
        token = _FIRST_MERGE + len(merges)
        merges.append(best)
        changed: set[Pair] = set()
        for index in pairs.words.pop(best):
            before = symbols[index]
            after = _replace_pair(before, best, token)
            if len(after) == len(before):
                continue
            pairs.add(before, index, -counts[index])
            pairs.add(after, index, counts[index])
            changed.update(pairwise(before), pairwise(after))
            symbols[index] = after
        pairs.push(changed)
    return merges
