"""Parquet: a wrong row is one row, what the storage fails to give is no fault of the file, and memory has a bound."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.packing import Watch, content, parquet, run

from fireflyer.base.errors import FireflyerError, PermanentError, Timeout
from fireflyer.base.units import KIB, MIB
from fireflyer.data.packing import Encoding, InvalidInput, Position
from fireflyer.data.packing.inputs import find_inputs
from fireflyer.data.packing.parquet import read_parquet
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.tools.trees import LocalFile

pyarrow = pytest.importorskip("pyarrow")
PARQUET: dict[str, Any] = {"format": "parquet", "field": None}


def text_of(values: list[bytes]) -> Any:
    """A column of text that is not checked."""
    return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())


def test_a_row_that_is_not_utf8_is_named_and_may_be_left_out(tmp_path: Path) -> None:
    columns = {"text": text_of([b"a", b"\xff", b"b", b"c\xc3"]), "n": [1, 2, 3, 4]}
    source = parquet(tmp_path / "a.parquet", columns)
    for wanted in (("text",), ("n", "text")):
        target = tmp_path / "-".join(wanted)
        said = r"a\.parquet: row 2: column 'text' is not UTF-8: invalid start byte at byte 0"
        with pytest.raises(InvalidInput, match=said):
            run(source, target, **PARQUET, columns=wanted)
        watch = Watch()
        assert run(source, target, watch, **PARQUET, columns=wanted, skip_invalid=True).skipped == 2
        assert "row 4: column 'text' is not UTF-8" in watch.problems[1]
    assert content(tmp_path / "text") == [b"a", b"b"]


def test_numbers_that_json_cannot_say_are_not_stored_as_null(tmp_path: Path) -> None:
    values = [1.5, None, float("nan"), float("inf")]
    columns = {"n": values, "in": [{"x": [one]} for one in values], "text": ["null"] * 4}
    source = parquet(tmp_path / "a.parquet", columns)
    for column in ("n", "in"):
        target = tmp_path / column
        with pytest.raises(InvalidInput, match=r"a\.parquet: row 3: holds NaN or Infinity, which JSON cannot say"):
            run(source, target, **PARQUET, columns=(column, "text"))
        assert run(source, target, **PARQUET, columns=(column, "text"), skip_invalid=True).skipped == 2
    assert [msgspec.json.decode(one)["n"] for one in content(tmp_path / "n")] == [1.5, None]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([[1, 65535], [], [7]], [b"\1\0\xff\xff", b"", b"\7\0"]),
        ([[1, None], [65536], [-1], [2]], [b"\2\0"]),
        ([[1.0], [2.0]], []),
        ([[[1]], [[]]], []),
        ([None, [3]], [b"\3\0"]),
    ],
)
def test_lists_of_tokens_are_records_and_other_lists_are_not(
    tmp_path: Path, values: list[Any], kept: list[bytes]
) -> None:
    packed = run(parquet(tmp_path / "a.parquet", {"ids": values}), tmp_path / "set", **PARQUET, skip_invalid=True)
    assert (content(tmp_path / "set"), packed.skipped) == (kept, len(values) - len(kept))


@pytest.mark.parametrize(
    "error", ["ArrowNotImplementedError", "ArrowKeyError", "ArrowTypeError", "ArrowCapacityError", "ArrowMemoryError"]
)
def test_whatever_pyarrow_raises_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    source = parquet(tmp_path / "a.parquet", {"text": ["a"]})
    kind = getattr(pyarrow, error)

    def failing(*arguments: Any, **named: Any) -> Any:
        raise kind("no such\nthing")

    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", failing)
    with pytest.raises(InvalidInput, match=r"a\.parquet: .*: no such$"):
        run(source, tmp_path / "set", **PARQUET)


@pytest.mark.parametrize("failing_read", [1, 2, 3])
@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO)), PermanentError, "the device failed"),
        (file_error(errno.ETIMEDOUT, "no replica answers", "/x"), Timeout, "timed out"),
    ],
)
def test_a_failure_of_the_storage_is_not_one_of_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing_read: int,
    error: OSError,
    raised: type[FireflyerError],
    said: str,
) -> None:
    source = parquet(tmp_path / "a.parquet", {"text": [os.urandom(1000).hex() for _ in range(100)]}, rows=10)
    real, reads = LocalFile.read, [0]

    def failing(self: LocalFile, size: int | None = -1) -> bytes:
        reads[0] += 1
        if reads[0] == failing_read:
            raise error
        return real(self, size)

    monkeypatch.setattr(LocalFile, "read", failing)
    with pytest.raises(raised, match=rf"a\.parquet: {said}") as caught:
        run(source, tmp_path / "set", **PARQUET, shard_bytes=MIB)
    assert not isinstance(caught.value, InvalidInput)


def peak_bytes(path: str, column: str, rows: int, value_bytes: int) -> int:
    """Memory of pyarrow while all rows are read, one after another."""
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(pool)
    try:
        found = 0
        for item in read_parquet(find_inputs([path], "parquet"), Position(), Encoding(), (column,)):
            assert item.record is not None
            assert len(item.record) >= value_bytes
            found += 1
        assert found == rows
        return int(pool.max_memory())
    finally:
        pyarrow.set_memory_pool(before)


def test_a_value_that_many_rows_share_is_in_memory_a_few_times(tmp_path: Path) -> None:
    import pyarrow.parquet

    size, rows = 256 * KIB, 512
    shared = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["x" * size])
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": shared}), path, store_schema=False)
    assert os.path.getsize(path) < MIB
    assert peak_bytes(path, "text", rows, size) < 16 * MIB


def test_of_values_that_repeat_what_is_before_them_a_few_are_decoded_at_a_time(tmp_path: Path) -> None:
    import pyarrow.parquet

    size, rows = 128 * KIB, 256
    path = str(tmp_path / "a.parquet")
    table = pyarrow.table({"text": ["x" * size + str(number) for number in range(rows)]})
    encoding = {"text": "DELTA_BYTE_ARRAY"}
    pyarrow.parquet.write_table(table, path, use_dictionary=False, column_encoding=encoding)
    assert os.path.getsize(path) < MIB
    assert peak_bytes(path, "text", rows, size) < 8 * MIB


def test_of_large_values_a_few_are_decoded_at_a_time(tmp_path: Path) -> None:
    size, rows = 128 * KIB, 256
    path = parquet(tmp_path / "a.parquet", {"text": [os.urandom(size // 2).hex() for _ in range(rows)]}, rows=rows)
    assert peak_bytes(path, "text", rows, size) < rows * size * 1.5
