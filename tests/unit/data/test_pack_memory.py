"""Memory of packing is bounded by the length of a line or a text, whatever is in it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from tests.support.packing import run

from fireflyer.base.units import MIB
from fireflyer.data import BpeTokenizer
from fireflyer.data.packing import InvalidInput, readers


@pytest.mark.parametrize("field", ["text", None])
@pytest.mark.parametrize("block_bytes", [7, MIB])
def test_a_line_of_too_many_values_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str | None, block_bytes: int
) -> None:
    """However short they are: of these each takes 20 times its bytes as an object of Python."""
    monkeypatch.setattr(readers, "MAX_VALUES", 1000)
    monkeypatch.setattr(readers, "_BLOCK_BYTES", block_bytes)
    most = ['{"other":[' + "{}," * 495 + '1],"text":"a"}', '{"text":"' + r"[{,\\\"," * 300 + '"}']
    (tmp_path / "a.jsonl").write_text("\n".join(most))
    assert run(str(tmp_path / "a.jsonl"), tmp_path / "set", field=field, shard_bytes=MIB).records == 2
    (tmp_path / "b.jsonl").write_text('{"text":"a","other":[' + "[]," * 600 + "[]]}")
    with pytest.raises(InvalidInput, match=r"b\.jsonl:1: holds more than 1000 values"):
        run(str(tmp_path / "b.jsonl"), tmp_path / "other", field=field)


def test_a_text_of_many_words_takes_no_more_memory_than_its_length() -> None:
    text = b" a" * 200_000
    tokenizer = BpeTokenizer([(32, 97)])
    tracemalloc.start()
    try:
        assert tokenizer.encode(text).tobytes() == b"\1\1" * 200_000
        assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    finally:
        tracemalloc.stop()
