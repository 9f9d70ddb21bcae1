"""From a value of an input to the bytes of a record.

Text becomes its UTF-8 bytes, or with a tokenizer its tokens and END_OF_TEXT as little-endian uint16, which is what
`TokenWindows` reads. A list of integers from 0 to 65535 is taken as tokens already: with a tokenizer, of its
vocabulary, and END_OF_TEXT is put after them too unless they end with it.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.data.tokenizer import END_OF_TEXT, BpeTokenizer, ByteTokenizer
from fireflyer.native import crc32c

__all__ = ["Encoding", "NotARecord", "encoding_of"]

_BYTES_TOKENIZER: Final = "bytes"
_TOKEN: Final = np.dtype("<u2")
_MAX_TOKEN: Final = 65535


class NotARecord(Exception):
    """Says what is wrong with a value, without where it is."""


class Encoding:
    """How values become records. Immutable."""

    def __init__(self, tokenizer: BpeTokenizer | None = None, *, end_of_text: bool = True) -> None:
        self.tokenizer = tokenizer
        self.end_of_text = end_of_text

    @property
    def meta(self) -> dict[str, Any]:
        """What the data set says of it."""
        if self.tokenizer is None:
            return {"encoding": "bytes"}
        return {
            "encoding": "tokens",
            "dtype": "uint16",
            "vocab_size": self.tokenizer.vocab_size,
            "tokenizer_crc32c": crc32c(self.tokenizer.to_json()),
            "end_of_text": END_OF_TEXT if self.end_of_text else None,
        }

    def text(self, value: str | bytes) -> bytes:
        """Raises `NotARecord`."""
        try:
            data = value.encode() if isinstance(value, str) else value
        except UnicodeEncodeError as error:
            raise NotARecord(
                f"holds half a surrogate pair at character {error.start}, which UTF-8 cannot say"
            ) from None
        if self.tokenizer is None:
            return data
        return self._ended(self.tokenizer.encode(data))

    def value(self, value: object) -> bytes:
        """Of text, bytes or a list of tokens. Raises `NotARecord`."""
        if isinstance(value, str | bytes):
            return self.text(value)
        if isinstance(value, list | np.ndarray):
            return self._ended(self._tokens(value))
        raise NotARecord(f"is {_kind(value)}, not text or a list of tokens")

    def _tokens(self, values: list[Any] | NDArray[Any]) -> NDArray[Any]:
        most = _MAX_TOKEN if self.tokenizer is None else self.tokenizer.vocab_size - 1
        if isinstance(values, list):
            right = all(type(one) is int and 0 <= one <= most for one in values)
        else:
            right = values.ndim == 1 and values.dtype.kind in "iu"
            right = right and (not values.size or (int(values.min()) >= 0 and int(values.max()) <= most))
        if not right:
            raise NotARecord(f"is a list of something else than tokens, integers from 0 to {most}")
        return np.asarray(values, _TOKEN)

    def _ended(self, tokens: NDArray[Any]) -> bytes:
        if self.tokenizer is not None and self.end_of_text and not (len(tokens) and tokens[-1] == END_OF_TEXT):
            tokens = np.append(tokens, np.uint16(END_OF_TEXT))
        return tokens.astype(_TOKEN, copy=False).tobytes()

    def fields(self, values: dict[str, Any]) -> bytes:
        """Several values, as a JSON object. Raises `NotARecord`."""
        try:
            data = msgspec.json.encode(values)
        except (TypeError, UnicodeEncodeError) as error:
            raise NotARecord(f"cannot be written as JSON: {error}") from None
        if b"null" in data and _holds_non_finite(values):  # which is what msgspec makes of them
            raise NotARecord("holds NaN or Infinity, which JSON cannot say")
        return self.text(data)


def _holds_non_finite(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_holds_non_finite, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_non_finite, value))


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return {bool: "a truth value", int: "a number", float: "a number", dict: "an object"}.get(
        type(value), f"of type {type(value).__name__}"
    )


def encoding_of(tokenizer: str | None, *, end_of_text: bool = True) -> Encoding:
    """`tokenizer`: a file of `BpeTokenizer.save`, "bytes" for a token for each byte, or None for no tokens. Raises
    `NotFound`, `DataCorruption`, `UsageError`."""
    if tokenizer is None:
        if not end_of_text:
            raise UsageError("end of text is of tokens; give a tokenizer, or leave it out")
        return Encoding()
    return Encoding(_tokenizer(tokenizer), end_of_text=end_of_text)


def _tokenizer(given: str) -> BpeTokenizer:
    if given == _BYTES_TOKENIZER:
        return ByteTokenizer()
    try:
        return BpeTokenizer.load(given)
    except NotFound:
        raise NotFound(
            f"tokenizer {given!r} is no file; give one that BpeTokenizer.save wrote, or the word {_BYTES_TOKENIZER}"
        ) from None
