"""Rows of Parquet files as records, with pyarrow (`pip install fireflyer[parquet]`). Memory is bounded by the largest
row group's columns that are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.data.packing.inputs import Input, open_input
from fireflyer.data.packing.items import InvalidInput, Item, Position
from fireflyer.data.packing.values import Encoding, NotARecord

__all__ = ["read_parquet", "require_pyarrow"]

_ROWS: Final = 1024
"""Of one batch of pyarrow."""


def require_pyarrow() -> Any:
    """The module `pyarrow.parquet`. Raises `UsageError` where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            "Parquet files are read with pyarrow, which is not installed; run: pip install 'fireflyer[parquet]'"
        ) from error
    return pyarrow.parquet


def read_parquet(
    inputs: Sequence[Input], begin: Position, encoding: Encoding, columns: Sequence[str]
) -> Iterator[Item]:
    """Each row a record: the value of one column, or a JSON object of several. `columns` may be left out where a file
    has but one."""
    parquet = require_pyarrow()
    for number in range(begin.input, len(inputs)):
        start = begin if number == begin.input else Position(number)
        yield from _read_rows(parquet, inputs[number], start, encoding, columns)


def _read_rows(parquet: Any, one: Input, begin: Position, encoding: Encoding, columns: Sequence[str]) -> Iterator[Item]:
    file = open_input(one)
    try:
        content = _opened(parquet, one, file)
        wanted = _wanted(one, content.schema_arrow.names, columns)
        rows = content.metadata.num_rows
        bytes_a_row = one.size // max(1, rows)
        row = 0
        for group in range(content.metadata.num_row_groups):
            count = content.metadata.row_group(group).num_rows
            if row + count <= begin.at:  # all of it was packed before
                row += count
                continue
            for batch in content.iter_batches(_ROWS, row_groups=[group], columns=wanted):
                for values in batch.to_pylist():
                    row += 1
                    if row > begin.at:
                        yield _item(one, Position(begin.input, row), values, wanted, encoding, bytes_a_row)
    except FireflyerError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's own errors are these
        raise InvalidInput(f"{one.place.name}: damaged, or not a Parquet file: {error}") from error
    finally:
        file.close()


def _opened(parquet: Any, one: Input, file: Any) -> Any:
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{one.place.name}: not a Parquet file: {error}") from error


def _wanted(one: Input, there: Sequence[str], columns: Sequence[str]) -> list[str]:
    for name in columns:
        if name not in there:
            raise UsageError(f"{one.place.name}: has no column {name!r}; its columns: {', '.join(there)}")
    if columns:
        return list(columns)
    if len(there) != 1:
        raise UsageError(f"{one.place.name}: has the columns {', '.join(there)}; say which with --column")
    return list(there)


def _item(
    one: Input, after: Position, values: dict[str, Any], wanted: Sequence[str], encoding: Encoding, source_bytes: int
) -> Item:
    try:
        if len(wanted) > 1:
            record = encoding.fields({name: values[name] for name in wanted})
        else:
            record = encoding.value(values[wanted[0]])
    except NotARecord as error:
        column = f"column {wanted[0]!r} " if len(wanted) == 1 else ""
        return Item(None, after, None, source_bytes, f"{one.place.name}: row {after.at}: {column}{error}")
    return Item(record, after, None, source_bytes)
