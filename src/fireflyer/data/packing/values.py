"""From a value of an input to the bytes of a record.

Text becomes its UTF-8 bytes, or with a tokenizer its tokens and END_OF_TEXT as little-endian uint16, which is what
`TokenWindows` reads. A list of integers from 0 to 65535 is taken as tokens already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.data.tokenizer import END_OF_TEXT, BpeTokenizer, ByteTokenizer
from fireflyer.native import crc32c

__all__ = ["Encoding", "NotARecord", "encoding_of"]

_BYTES_TOKENIZER: Final = "bytes"
_TOKEN: Final = np.dtype("<u2")


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
        tokens = self.tokenizer.encode(data)
        if self.end_of_text:
            tokens = np.append(tokens, np.uint16(END_OF_TEXT))
        return tokens.astype(_TOKEN).tobytes()

    def value(self, value: object) -> bytes:
        """Of text, bytes or a list of tokens. Raises `NotARecord`."""
        if isinstance(value, str | bytes):
            return self.text(value)
        if isinstance(value, list | np.ndarray):
            return self._tokens(value)
        raise NotARecord(f"is {_kind(value)}, not text or a list of tokens")

    def _tokens(self, values: Sequence[Any] | np.ndarray[Any, Any]) -> bytes:
        try:
            array = np.asarray(values)
        except ValueError:  # lists of unequal lengths
            array = np.asarray(None)
        if array.size == 0:
            return b""
        if array.ndim != 1 or array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) > 65535:
            raise NotARecord("is a list of something else than tokens, integers from 0 to 65535")
        return array.astype(_TOKEN).tobytes()

    def fields(self, values: dict[str, Any]) -> bytes:
        """Several values, as a JSON object. Raises `NotARecord`."""
        try:
            return self.text(msgspec.json.encode(values))
        except (TypeError, UnicodeEncodeError) as error:
            raise NotARecord(f"cannot be written as JSON: {error}") from None


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
