"""Rows of Parquet files as records, with pyarrow (`pip install fireflyer[parquet]`).

Memory: the columns that are read of one row group, as they lie in the file without compression, and a few rows: what
many rows share is small in the file, and decoded as often as it is there. Values become objects of Python row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB
from fireflyer.data.packing.inputs import Input, open_input
from fireflyer.data.packing.items import InvalidInput, Item, Position
from fireflyer.data.packing.values import Encoding, NotARecord
from fireflyer.data.places import translated

__all__ = ["read_parquet", "require_pyarrow"]

_ROWS: Final = 16
"""That are decoded at a time, at most: with more the time for each is hardly less."""
_BATCH_BYTES: Final = 4 * MIB
"""That these rows have on average, if they are more than one."""
_VALUE_BYTES: Final = 8


def require_pyarrow() -> Any:
    """The module `pyarrow`, with `pyarrow.parquet`. Raises `UsageError` where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            "Parquet files are read with pyarrow, which is not installed; run: pip install 'fireflyer[parquet]'"
        ) from error
    return pyarrow


def read_parquet(
    inputs: Sequence[Input], begin: Position, encoding: Encoding, columns: Sequence[str]
) -> Iterator[Item]:
    """Each row a record: the value of one column, or a JSON object of several. `columns` may be left out where a file
    has but one."""
    for number in range(begin.input, len(inputs)):
        start = begin if number == begin.input else Position(number)
        file = _File(inputs[number])
        try:
            yield from file.items(start, encoding, columns)
        finally:
            file.close()


class _Bytes:
    """An input as pyarrow reads it. `failure` tells whether the storage failed: pyarrow's own errors are `OSError`,
    too."""

    mode = "rb"

    def __init__(self, one: Input) -> None:
        self._file = open_input(one)
        self.failure: OSError | None = None

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        return bytes(self._do(self._file.read, size))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._do(self._file.seek, offset, whence))

    def tell(self) -> int:
        return int(self._do(self._file.tell))

    def _do(self, operation: Any, *arguments: Any) -> Any:
        try:
            return operation(*arguments)
        except OSError as error:
            self.failure = error
            raise


class _File:
    """One file."""

    def __init__(self, one: Input) -> None:
        self._pyarrow = require_pyarrow()
        self._one = one
        self._bytes = _Bytes(one)

    def close(self) -> None:
        self._bytes.close()

    def items(self, begin: Position, encoding: Encoding, columns: Sequence[str]) -> Iterator[Item]:
        content = self._call(self._pyarrow.parquet.ParquetFile, self._bytes)
        wanted = _wanted(self._one, self._call(lambda: content.schema_arrow.names), columns)
        leaves = [at for at in range(len(content.schema)) if _is_in(content.schema.column(at).path, wanted)]
        metadata = content.metadata
        bytes_a_row = self._one.size // max(1, metadata.num_rows)
        row = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if row + group.num_rows <= begin.at:  # all of it was packed before
                row += group.num_rows
                continue
            size = self._call(_rows, group, leaves)
            batches = self._call(content.iter_batches, size, row_groups=[number], columns=wanted)
            while (batch := self._call(next, batches, None)) is not None:
                found = {name: batch.column(name) for name in wanted}
                for at in range(batch.num_rows):
                    row += 1
                    if row > begin.at:
                        values = {name: column[at] for name, column in found.items()}
                        yield self._item(Position(begin.input, row), values, encoding, bytes_a_row)

    def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """Raises `InvalidInput` where the content is wrong, and what the failure of the storage is."""
        try:
            return function(*arguments, **named)
        except (self._pyarrow.ArrowException, OSError, ValueError) as error:
            if self._bytes.failure is not None:
                with translated(f"read {self._one.place.name}"):
                    raise self._bytes.failure from error
            why = _first_line(error)
            if isinstance(error, NotImplementedError):
                raise InvalidInput(f"{self._one.place.name}: pyarrow cannot read it: {why}") from error
            raise InvalidInput(f"{self._one.place.name}: not a Parquet file, or damaged: {why}") from error

    def _item(self, after: Position, values: dict[str, Any], encoding: Encoding, source_bytes: int) -> Item:
        try:
            if len(values) == 1:
                ((name, value),) = values.items()
                record = self._of_column(name, value, encoding)
            else:
                record = encoding.fields({name: self._value(name, value) for name, value in values.items()})
        except NotARecord as error:
            return Item(None, after, None, source_bytes, f"{self._one.place.name}: row {after.at}: {error}")
        return Item(record, after, None, source_bytes)

    def _of_column(self, name: str, scalar: Any, encoding: Encoding) -> bytes:
        integers = self._integers(scalar)
        value = self._value(name, scalar) if integers is None else integers
        try:
            return encoding.value(value)
        except NotARecord as error:
            raise NotARecord(f"column {name!r} {error}") from None

    def _integers(self, scalar: Any) -> Any:
        """A list of integers as an array of NumPy, which takes a fifth of the memory; None where it is something
        else."""
        values = scalar.values if isinstance(scalar, self._pyarrow.ListScalar) else None
        if values is None or not self._pyarrow.types.is_integer(values.type) or values.null_count:
            return None
        return values.to_numpy()

    def _value(self, name: str, scalar: Any) -> object:
        try:
            return scalar.as_py()
        except UnicodeDecodeError as error:
            raise NotARecord(f"column {name!r} is not UTF-8: {error.reason} at byte {error.start}") from None
        except (self._pyarrow.ArrowException, ValueError, OverflowError) as error:
            raise NotARecord(f"column {name!r} cannot be taken: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _is_in(path: str, columns: Sequence[str]) -> bool:
    """Whether the leaf at `path` belongs to one of these columns."""
    return any(path == name or path.startswith(f"{name}.") for name in columns)


def _rows(group: Any, leaves: Sequence[int]) -> int:
    """How many rows of a row group to decode at a time."""
    chunks = [group.column(at) for at in leaves]
    size = sum(max(chunk.total_uncompressed_size, chunk.num_values * _VALUE_BYTES) for chunk in chunks)
    return int(max(1, min(_ROWS, group.num_rows * _BATCH_BYTES // max(1, size))))


def _wanted(one: Input, there: Sequence[str], columns: Sequence[str]) -> list[str]:
    for name in columns:
        if name not in there:
            raise UsageError(f"{one.place.name}: has no column {name!r}; its columns: {', '.join(there)}")
    if columns:
        return list(dict.fromkeys(columns))
    if len(there) != 1:
        raise UsageError(f"{one.place.name}: has the columns {', '.join(there)}; say which with --column")
    return list(there)
