"""Packs inputs into a data set, and goes on where an earlier attempt ended.

    read an item -> it does not fit any more: finish the shard, note where the item begins -> add it

After each shard the state file says how many shards are there and at which item the next one begins. Whenever the
packer ends, for whatever reason, the same call goes on there; the shard that was not finished is made again, from the
same items. Readers see nothing before the manifest is written, which is last. One packer at a time is in a directory
(`fireflyer.data.packing.claim`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import msgspec

from fireflyer.base.errors import Exists, FireflyerError, NotFound, UsageError
from fireflyer.base.units import format_bytes
from fireflyer.data.files import make_directories
from fireflyer.data.manifest import names_file, shard_file
from fireflyer.data.packing.claim import LOCK_NAME, Claim, alone
from fireflyer.data.packing.inputs import Format, Input, InputsDigest, find_inputs
from fireflyer.data.packing.items import InvalidInput, Item, Position
from fireflyer.data.packing.parquet import read_parquet, require_pyarrow
from fireflyer.data.packing.readers import read_files, read_jsonl, same_until
from fireflyer.data.packing.state_file import STATE_NAME, State
from fireflyer.data.packing.values import Encoding
from fireflyer.data.places import disk_of, place_of
from fireflyer.data.recordset_writer import DEFAULT_SHARD_BYTES, RecordSetWriter
from fireflyer.data.shard_format import MAX_RECORD_BYTES, ShardInfo, largest_record
from fireflyer.data.shard_reader import ShardReader

__all__ = ["Observer", "PackOptions", "Packed", "pack"]

MAX_TOLD: Final = 100
"""Of inputs that are left out, how many are told."""


class PackOptions(msgspec.Struct, frozen=True, kw_only=True):
    format: Format
    field: str | None = None
    """JSONL: of each object; None: the whole line."""
    columns: tuple[str, ...] = ()
    """Parquet."""
    shard_bytes: int = DEFAULT_SHARD_BYTES
    skip_invalid: bool = False
    """Go on after an item that cannot be a record, and count it, instead of stopping there."""
    restart: bool = False
    """Begin anew what was left unfinished."""
    token_file: str | None = None


class Packed(msgspec.Struct, frozen=True):
    records: int
    data_bytes: int
    shards: int
    skipped: int
    continued: int
    """Records that an earlier attempt had packed."""


class Observer(Protocol):
    def begun(self, total_bytes: int, done_bytes: int, records: int) -> None: ...
    def advanced(self, source_bytes: int, records: int) -> None: ...
    def skipped(self, problem: str) -> None: ...


def pack(paths: Sequence[str], target: str, encoding: Encoding, options: PackOptions, observer: Observer) -> Packed:
    """`paths`: files and directories; both they and `target` may be `ff://…`. The directory `target` is made; it may
    be below one of `paths`. Raises `InvalidInput`, `Exists` where it holds a data set, `Busy` where another pack into
    it is running, `UsageError`, `NotFound`, `NoSpace`."""
    _check(options)
    place = place_of(target, token_file=options.token_file)
    inputs = find_inputs(paths, options.format, target=place, token_file=options.token_file)
    disk, directory, shown = disk_of(target, token_file=options.token_file)
    if disk.exists(directory) and not disk.is_dir(directory):
        raise Exists(f"{shown} is a file; the data set needs a directory, which is made: give a new one")
    made = not disk.exists(directory)
    make_directories(disk, directory)
    claim = Claim(disk, directory, shown)
    if not {STATE_NAME, LOCK_NAME}.intersection(disk.list(directory)):
        claim.refuse_finished()  # without a lock: it may be one that nobody may write to
    try:
        with alone(disk, directory, shown):
            claim.refuse_finished()
            return _Packer(inputs, target, claim, encoding, options, observer).run()
    except BaseException:
        if made:
            with contextlib.suppress(FireflyerError):  # it is not empty
                disk.rmdir(directory)
        raise


def _check(options: PackOptions) -> None:
    if options.field is not None and options.format != "jsonl":
        raise UsageError(f"a field is of JSONL; the format is {options.format}")
    if options.columns and options.format != "parquet":
        raise UsageError(f"columns are of Parquet; the format is {options.format}")
    if options.format == "parquet":
        require_pyarrow()


class _Packer:
    def __init__(
        self,
        inputs: Sequence[Input],
        target: str,
        claim: Claim,
        encoding: Encoding,
        options: PackOptions,
        observer: Observer,
    ) -> None:
        self._inputs, self._target, self._claim = inputs, target, claim
        self._encoding, self._options, self._observer = encoding, options, observer
        self._options_digest = self._digest_options()
        self._digest = InputsDigest(inputs)
        self._skipped = 0
        self._read_bytes = 0

    def run(self) -> Packed:
        begun = self._begin()
        self._skipped, self._read_bytes = begun.skipped, begun.source_bytes
        self._observer.begun(sum(one.size for one in self._inputs), begun.source_bytes, begun.records)
        writer = RecordSetWriter(
            self._target,
            shard_bytes=self._options.shard_bytes,
            named=self._options.format == "files",
            done=self._finished(begun.shards),
            token_file=self._options.token_file,
            before_publish=self._claim.require_mine,
        )
        try:
            self._fill(writer, begun.position)
            writer.meta.update(self._meta())
            writer.commit()
        except BaseException as error:
            writer.suspend()
            if isinstance(error, NotFound):  # who has taken over removes our temporary files
                self._claim.require_mine()
            if not writer.shards and not writer.names:
                self._claim.forget()
            raise
        self._claim.remove_state()
        return Packed(
            writer.records,
            sum(one.data_bytes for one in writer.shards),
            len(writer.shards),
            self._skipped,
            begun.records,
        )

    def _fill(self, writer: RecordSetWriter, position: Position) -> None:
        for item in map(self._fitting, self._items(position)):
            if item.record is None:
                self._skip(item)
            else:
                if not writer.fits(len(item.record)):
                    writer.finish_shard()
                    self._note(writer, position)
                writer.add(item.record, item.name)
            position = item.after
            self._read_bytes += item.source_bytes
            self._observer.advanced(item.source_bytes, int(item.record is not None))

    def _fitting(self, item: Item) -> Item:
        """The item, or one that cannot be a record where no shard has room for it."""
        if item.record is None:
            return item
        size, most = len(item.record), largest_record(self._options.shard_bytes)
        if size <= most:
            return item
        after = item.after
        where = self._inputs[after.input if after.at else after.input - 1].place.name
        if after.at:
            where += f":{after.line}" if self._options.format == "jsonl" else f": row {after.at}"
        advice = "" if most >= MAX_RECORD_BYTES else "; give a larger --shard-size, with --restart if shards are done"
        problem = f"{where}: a record of {format_bytes(size)}, and a shard takes {format_bytes(most)}{advice}"
        return item._replace(record=None, problem=problem)

    def _items(self, position: Position) -> Iterator[Item]:
        match self._options.format:
            case "files":
                return read_files(self._inputs, position, self._encoding)
            case "jsonl":
                return read_jsonl(self._inputs, position, self._encoding, self._options.field)
            case "parquet":
                return read_parquet(self._inputs, position, self._encoding, self._options.columns)

    def _skip(self, item: Item) -> None:
        if not self._options.skip_invalid:
            raise InvalidInput(
                f"{item.problem}; correct it and run the same command again, which goes on after the shards that are "
                "done, or leave such inputs out with --skip-invalid"
            )
        self._skipped += 1
        if self._skipped <= MAX_TOLD:
            self._observer.skipped(item.problem)

    def _meta(self) -> dict[str, Any]:
        found: dict[str, Any] = {"format": self._options.format, **self._encoding.meta, "inputs": len(self._inputs)}
        if self._options.field is not None:
            found["field"] = self._options.field
        if self._options.columns:
            found["columns"] = list(self._options.columns)
        return {**found, "source_bytes": self._read_bytes, "skipped": self._skipped}

    # --- how far it is ---

    def _begin(self) -> State:
        fresh = State(
            owner=self._claim.owner, options=self._options_digest, inputs=InputsDigest(()).of_first(0), shards=0,
            records=0, skipped=0, source_bytes=0, position=Position(),
        )  # fmt: skip
        if self._options.restart and self._claim.has_state():
            begun = fresh
        elif (state := self._claim.load()) is not None:
            self._require_same(state)
            begun = msgspec.structs.replace(state, owner=self._claim.owner)
        else:
            self._claim.require_no_shards()
            begun = fresh
        self._claim.take_over(begun)
        return begun

    def _require_same(self, state: State) -> None:
        what = f"{self._claim.shown} holds an unfinished data set"
        if state.options != self._options_digest:
            raise UsageError(
                f"{what} that was begun with other inputs or options; repeat that command, or begin anew with --restart"
            )
        if state.position.input > len(self._inputs) or state.inputs != self._inputs_digest(state.position):
            raise UsageError(f"{what}, and files that were packed into it have changed; begin anew with --restart")
        if self._options.format == "jsonl" and state.position.at:
            one = self._inputs[state.position.input]
            if not same_until(one, state.position):
                raise UsageError(
                    f"{what}, and the first {state.position.line} lines of {one.place.name} have changed since they "
                    "were packed into it; begin anew with --restart"
                )

    def _digest_options(self) -> str:
        """Of the names of the inputs too: with others, positions would mean something else."""
        digest = hashlib.blake2b(digest_size=16)
        options = msgspec.structs.replace(self._options, skip_invalid=False, restart=False, token_file=None)
        digest.update(msgspec.json.encode([options, self._encoding.meta]))
        for one in self._inputs:
            digest.update(one.place.name.encode("utf-8", "surrogateescape") + b"\0")
        return digest.hexdigest()

    def _inputs_digest(self, position: Position) -> str:
        """Of what was packed. Of JSONL the file that was begun may grow or be corrected behind the position."""
        end = position.input + (1 if position.at and self._options.format != "jsonl" else 0)
        return self._digest.of_first(end)

    def _note(self, writer: RecordSetWriter, position: Position) -> None:
        state = State(
            owner=self._claim.owner,
            options=self._options_digest,
            inputs=self._inputs_digest(position),
            shards=len(writer.shards),
            records=writer.records,
            skipped=self._skipped,
            source_bytes=self._read_bytes,
            position=position,
        )
        self._claim.save(state)

    def _finished(self, count: int) -> tuple[list[ShardInfo], list[ShardInfo]]:
        """The shards that are there, looked at. Raises `DataCorruption`, `NotFound`."""
        place = place_of(self._target, token_file=self._options.token_file)
        found: tuple[list[ShardInfo], list[ShardInfo]] = [], []
        for number in range(count):
            files = [shard_file(number), names_file(number)][: 2 if self._options.format == "files" else 1]
            for name, into in zip(files, found, strict=False):
                with ShardReader(place.below(name)) as reader:
                    into.append(reader.info)
        return found
