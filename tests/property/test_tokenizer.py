"""Encoding loses nothing, training depends on nothing but its input, and a bad vocabulary file is named."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.data import tokenizer as tokenizer_module
from fireflyer.data.tokenizer import END_OF_TEXT, BpeTokenizer, ByteTokenizer
from fireflyer.native import crc32c

TEXT = "def add(left, right):\n    return left + right\n\n\ndef sub(left, right):\n    return left - right\n" * 3


@cache
def trained() -> BpeTokenizer:
    return BpeTokenizer.train([TEXT], 320)


code = st.text(alphabet=" \t\n(),+-:_abdeflnrstu0123é字🙂", max_size=200)


@given(st.binary(max_size=300) | st.builds(str.encode, code) | st.builds(str.encode, st.text()))
def test_decode_is_the_inverse_of_encode(data: bytes) -> None:
    for tokenizer in (trained(), ByteTokenizer()):
        ids = tokenizer.encode(data)
        assert tokenizer.decode(ids) == data
        assert ids.dtype == np.uint16
        assert END_OF_TEXT not in ids


@given(st.lists(st.sampled_from([" ", "\n", "ab", "é", "7", "(", "a" * 45, " " * 90, "\n" * 50]), max_size=60))
def test_words_are_the_same_wherever_a_text_is_cut_into_pieces(parts: list[str]) -> None:
    data = "".join(parts).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokenizer_module, "_PIECE_BYTES", 150)
        words = [word for some in tokenizer_module._words(data) for word in some]
    assert words == tokenizer_module._WORD.findall(data)


@given(code)
def test_text_comes_back_as_text(text: str) -> None:
    assert trained().decode_text(trained().encode(text)) == text


@given(st.lists(st.text(alphabet="ab cé\n", max_size=60), max_size=6), st.integers(257, 300))
def test_training_is_a_function_of_its_input(texts: list[str], vocab_size: int) -> None:
    first = BpeTokenizer.train(texts, vocab_size)
    assert first.to_json() == BpeTokenizer.train(iter(texts), vocab_size).to_json()
    assert first.to_json() == BpeTokenizer.train(reversed(texts), vocab_size).to_json()
    assert first.vocab_size <= vocab_size


@given(st.lists(st.text(alphabet="aabbc d", max_size=40), max_size=6), st.text(alphabet="abcd ", max_size=40))
def test_merges_are_learned_and_applied_by_the_definition(texts: list[str], other: str) -> None:
    """Held against it: count all pairs anew before every merge; apply the merges one after another."""
    tokenizer = BpeTokenizer.train(texts, 270)
    words = [list(word) for text in texts for word in split_words(text)]
    fresh = [list(word) for word in split_words(other)]
    for token, merge in enumerate(tokenizer.merges, start=257):
        counts = Counter(pair for word in words for pair in pairwise(word))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        assert (merge, counts[best] >= 2) == (best, True)
        words = [merged(word, best, token) for word in words]
        fresh = [merged(word, best, token) for word in fresh]
    if tokenizer.vocab_size < 270:
        assert max(Counter(pair for word in words for pair in pairwise(word)).values(), default=0) < 2
    assert tokenizer.encode(other).tolist() == [token for word in fresh for token in word]


def split_words(text: str) -> list[bytes]:
    """Words of an alphabet of letters and spaces: one space goes with the letters after it."""
    words: list[bytes] = []
    for part in text.replace(" ", "\n ").split("\n"):
        data = part.encode()
        if data.strip() == b"" and data and words and words[-1].strip() == b"":
            words[-1] += data
        elif data:
            words.append(data)
    return words


def merged(word: list[int], pair: tuple[int, int], token: int) -> list[int]:
    out = word.copy()
    at = 0
    while at + 1 < len(out):
        if (out[at], out[at + 1]) == pair:
            out[at : at + 2] = [token]
        at += 1
    return out


def test_merges_shorten_what_was_seen() -> None:
    assert len(trained().encode(TEXT)) < len(TEXT) / 3


def test_long_runs_of_anything_are_quick() -> None:
    for run in (b"a", b" ", b"\n", b"1", b"(", b"\xff"):
        assert trained().decode(trained().encode(run * 200_000)) == run * 200_000


def test_a_saved_tokenizer_is_the_same_one(tmp_path: Path) -> None:
    path = str(tmp_path / "tokenizer.json")
    ByteTokenizer().save(path)
    trained().save(path)
    loaded = BpeTokenizer.load(path)
    assert loaded.merges == trained().merges
    assert loaded.encode(TEXT).tolist() == trained().encode(TEXT).tolist()
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokenizer.json"]


def forged(*merges: tuple[int, ...], **changes: object) -> bytes:
    """A file whose checksum is right."""
    crc = crc32c(np.array(merges).astype("<u2").tobytes())
    return msgspec.json.encode({"format": "fireflyer-bpe", "version": 1, "crc32c": crc, "merges": merges} | changes)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "truncated"),
        (b"[]", "got `array`"),
        (forged(format="other"), "format 'other'"),
        (forged(version=2), "version 2"),
        (forged((97, 98), crc32c=1), "CRC32C"),
        (forged((257, 97)), "not two earlier ones"),
        (forged((-1, 97)), "not two earlier ones"),
        (forged((256, 97)), "not two earlier ones"),
        (forged((97, 97), (97, 97)), "repeats"),
        (forged((97, 97, 97)), "length 2"),
        (forged((97, 97), *((k, k) for k in range(257, 280))), "more than 64 bytes"),
        (forged(merges=[(97, 97)] * (1 << 16)), "at most"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataCorruption, match=rf"tokenizer\.json: not a tokenizer: .*{re.escape(why)}") as caught:
        BpeTokenizer.load(str(path))
    assert "\n" not in str(caught.value)


def test_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        BpeTokenizer.load(str(tmp_path / "missing.json"))
    with pytest.raises(UsageError, match="vocab_size=200"):
        BpeTokenizer.train([TEXT], 200)
    with pytest.raises(UsageError, match="this vocabulary has 0 to 256"):
        ByteTokenizer().decode([97, 257])
    with pytest.raises(UsageError, match="list of integers"):
        ByteTokenizer().decode([0.5])
    with pytest.raises(UsageError, match="cannot be encoded as UTF-8"):
        trained().encode("a\ud800")
    assert trained().decode([]) == b""
    assert trained().decode([97, END_OF_TEXT, 98]) == b"ab"
