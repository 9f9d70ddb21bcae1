"""Record shards: what went in comes out, by number, from any process; what is not whole and true is refused by name."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import struct
import threading
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import DataCorruption, Exists, FireflyerError, NoSpace, NotFound, UsageError
from fireflyer.data import ShardReader, ShardWriter
from fireflyer.native import crc32c
from fireflyer.sim.disk import Fault, FaultKind, SimDisk

RECORDS = [b"", b"one", b"x" * 8, bytes(range(256)) * 5, b"\0" * 17]


def write(path: Path, records: list[bytes]) -> str:
    with ShardWriter(str(path)) as writer:
        for number, record in enumerate(records):
            assert writer.add(record) == number
    return str(path)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(st.binary(max_size=200), max_size=30))
def test_records_come_back_by_number(tmp_path: Path, records: list[bytes]) -> None:
    path = tmp_path / "shard"
    path.unlink(missing_ok=True)
    write(path, records)
    with ShardReader(str(path)) as reader:
        assert [bytes(record) for record in reader] == records
        assert [bytes(reader[-k - 1]) for k in range(len(records))] == records[::-1]
        assert reader.lengths.tolist() == [len(record) for record in records]
        assert reader.info.data_bytes == sum(map(len, records))
        assert reader.info.file_bytes == path.stat().st_size


def test_the_bytes_are_those_of_the_specification(tmp_path: Path) -> None:
    header = b"FFSHARD\n" + struct.pack("<I", 1)
    header += struct.pack("<I", crc32c(header))
    index = (
        struct.pack("<QQ", 16, 24) + struct.pack("<II", 3, 9) + struct.pack("<II", crc32c(b"abc"), crc32c(b"123456789"))
    )
    trailer = struct.pack("<QQQIII", 40, 2, 12, crc32c(index), 1, 0)
    trailer += struct.pack("<I", crc32c(trailer)) + b"FFINDEX\n"
    whole = header + b"abc".ljust(8, b"\0") + b"123456789".ljust(16, b"\0") + index + trailer
    path = write(tmp_path / "shard", [b"abc", b"123456789"])
    assert Path(path).read_bytes() == whole
    assert crc32c(b"123456789") == 0xE3069283


def test_views_are_read_only_without_a_copy_and_outlive_the_reader(tmp_path: Path) -> None:
    numbers = np.arange(1000, dtype=np.uint16)
    reader = ShardReader(write(tmp_path / "shard", [b"abc", numbers.tobytes()]))
    view, array = reader[0], reader.array(1, np.uint16)
    assert view.readonly
    assert not array.flags.writeable
    assert not array.flags.owndata
    with pytest.raises(DataCorruption, match="record 0 has 3 bytes"):
        reader.array(0, np.uint16)
    reader.close()
    reader.close()
    assert bytes(view) == b"abc"
    assert np.array_equal(array, numbers)
    with pytest.raises(UsageError, match="this reader is closed"):
        reader[0]


def test_record_numbers_have_bounds(tmp_path: Path) -> None:
    reader = ShardReader(write(tmp_path / "shard", RECORDS))
    for index in (5, -6, 1 << 70):
        with pytest.raises(IndexError, match=f"record {index} is out of range; there are 5"):
            reader[index]


def test_large_records_bypass_the_buffer(tmp_path: Path) -> None:
    records = [b"small", os.urandom(3 << 20), b"", os.urandom(1 << 20), b"end"]
    assert [bytes(record) for record in ShardReader(write(tmp_path / "shard", records))] == records


def test_nothing_is_visible_before_commit_and_nothing_stays_after_abort(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    writer = ShardWriter(str(path))
    writer.add(b"abc")
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1
    writer.abort()
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="committed or aborted"):
        writer.add(b"x")
    with pytest.raises(KeyError), ShardWriter(str(path)):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_shard_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    first, second = ShardWriter(str(path)), ShardWriter(str(path))
    first.add(b"first")
    second.add(b"second")
    first.commit()
    with pytest.raises(Exists, match="never overwritten"):
        second.commit()
    with pytest.raises(Exists):
        ShardWriter(str(path))
    assert bytes(ShardReader(str(path))[0]) == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["shard"]


def test_the_size_of_a_shard_is_bounded_and_known_ahead(tmp_path: Path) -> None:
    writer = ShardWriter(str(tmp_path / "shard"), max_bytes=200)
    while writer.fits(10):
        writer.add(b"0123456789")
    with pytest.raises(UsageError, match="begin another shard"):
        writer.add(b"0123456789")
    announced = writer.file_bytes
    assert writer.commit().file_bytes == announced <= 200


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    whole = Path(write(tmp_path / "shard", RECORDS)).read_bytes()
    path = tmp_path / "cut"
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(DataCorruption, match="cut: "):
            ShardReader(str(path))
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataCorruption):
        ShardReader(str(path))


def reading_error(path: Path, expected: list[bytes]) -> str | None:
    """The error of reading a shard, None if it reads as `expected`."""
    try:
        assert [bytes(record) for record in ShardReader(str(path))] == expected
    except DataCorruption as error:
        return str(error)
    return None


def test_no_flipped_byte_goes_unnoticed(tmp_path: Path) -> None:
    """Every byte in turn: an error that names the file, or (in the zeros between records) no difference at all."""
    records = [b"", b"one", b"x" * 8, bytes(range(20))]
    whole = Path(write(tmp_path / "shard", records)).read_bytes()
    path = tmp_path / "flipped"
    harmless = 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :])
        error = reading_error(path, records)
        harmless += error is None
        assert error is None or re.fullmatch(r"\S+/flipped: .+; restore the file from a copy.*", error)
    assert harmless == (-3 % 8) + (-20 % 8)


def test_a_damaged_index_is_noticed_at_once(tmp_path: Path) -> None:
    whole = Path(write(tmp_path / "shard", [b"one", b"three"])).read_bytes()
    path = tmp_path / "flipped"
    for position in range(len(whole) - 48 - 2 * 16, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 2]) + whole[position + 1 :])
        with pytest.raises(DataCorruption, match="flipped: "):
            ShardReader(str(path), verify="never")


def forged(
    offsets: list[int], lengths: list[int], index_offset: int, *, records: int | None = None, more_bytes: int = 0
) -> bytes:
    """A shard whose checksums are all right and whose geometry is not."""
    header = b"FFSHARD\n" + struct.pack("<I", 1)
    header += struct.pack("<I", crc32c(header))
    data = header + b"abcdefgh" * 4
    index = np.array(offsets, "<u8").tobytes() + np.array(lengths, "<u4").tobytes() + bytes(4 * len(lengths))
    count = len(offsets) if records is None else records
    trailer = struct.pack("<QQQIII", index_offset, count, sum(lengths) + more_bytes, crc32c(index), 1, 0)
    return data + index + trailer + struct.pack("<I", crc32c(trailer)) + b"FFINDEX\n"


@pytest.mark.parametrize(
    "content",
    [
        forged([16, 16], [16, 32], 48),  # overlapping
        forged([16, 40], [16, 8], 48),  # a hole
        forged([0, 32], [32, 16], 48),  # the header as data
        forged([16], [1 << 31], 48),  # beyond the end
        forged([16, 2**64 - 16], [32, 16], 48),  # wrapping around
        forged([16], [32], 48, records=1 << 60),  # a huge count
        forged([16], [32], 48, records=2),
        forged([16], [32], 48, records=0),
        forged([16], [32], 48, more_bytes=1),
        forged([16], [32], 2**64 - 8),
        forged([16], [24], 48),  # ends before the index
        forged([16], [32], 40),
        forged([], [], 48),
        bytes(100),
        b"",
    ],
)
def test_hostile_geometry_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(content)
    with pytest.raises(DataCorruption, match="hostile: "):
        ShardReader(str(path))


def test_a_newer_version_is_no_corruption(tmp_path: Path) -> None:
    path = tmp_path / "newer"
    whole = Path(write(tmp_path / "shard", RECORDS)).read_bytes()
    header = b"FFSHARD\n" + struct.pack("<I", 2)
    path.write_bytes(header + struct.pack("<I", crc32c(header)) + whole[16:])
    with pytest.raises(UsageError, match="version 2"):
        ShardReader(str(path))


def test_when_a_record_is_verified_is_the_callers_choice(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "shard", [b"good", b"evil"]))
    never, first = ShardReader(str(path), verify="never"), ShardReader(str(path), verify="first")
    assert bytes(first[0]) == b"good"
    with path.open("r+b") as file:
        file.seek(16)
        file.write(b"bad!")
        file.seek(24)
        file.write(b"EVIL")
    assert bytes(never[1]) == b"EVIL"
    assert bytes(first[0]) == b"bad!", "it was checked once before"
    for reader in (first, first, ShardReader(str(path))):
        with pytest.raises(DataCorruption, match="record 1 has CRC32C"):
            reader[1]
    with pytest.raises(UsageError, match="verify='sometimes'"):
        ShardReader(str(path), verify="sometimes")  # type: ignore[arg-type]


def test_missing_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="missing"):
        ShardReader(str(tmp_path / "missing"))
    with pytest.raises(NotFound):
        ShardWriter(str(tmp_path / "no" / "shard"))
    with pytest.raises(FireflyerError):
        ShardReader(str(tmp_path))


def read_all(reader: ShardReader, answers: multiprocessing.SimpleQueue[list[bytes]]) -> None:
    answers.put([bytes(record) for record in reader])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("context", [multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")])
def test_other_processes_read_the_same_shard(tmp_path: Path, context: ForkContext | SpawnContext) -> None:
    """Inherited over a fork, and sent over by path."""
    reader = ShardReader(write(tmp_path / "shard", RECORDS), verify="first")
    answers = context.SimpleQueue()
    processes = [context.Process(target=read_all, args=(reader, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [answers.get() for _ in processes] == [RECORDS, RECORDS]
    for process in processes:
        process.join()
    twin = pickle.loads(pickle.dumps(reader))
    assert twin.verify == "first"


def test_threads_share_a_reader(tmp_path: Path) -> None:
    records = [os.urandom(100) for _ in range(200)]
    reader = ShardReader(write(tmp_path / "shard", records), verify="first")
    seen: list[bool] = []
    threads = [
        threading.Thread(target=lambda: seen.append([bytes(record) for record in reader] == records)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4


@pytest.mark.parametrize("kind", [FaultKind.NO_SPACE, FaultKind.EIO])
def test_a_failing_disk_leaves_no_shard(kind: FaultKind) -> None:
    """Each operation of the writer fails in turn: the error comes out, the name stays free, the temporary goes."""

    def program(disk: SimDisk) -> None:
        with ShardWriter("/shard", disk=disk.mount()) as writer:
            writer.add(b"abc" * 100)

    untroubled = SimDisk()
    program(untroubled)
    assert [record.operation for record in untroubled.operations] == ["create", "pwrite", "fsync", "rename", "sync_dir"]
    for index, operation in enumerate(untroubled.operations):
        disk = SimDisk()
        disk.faults.append(Fault(kind=kind, index=index))
        with pytest.raises(FireflyerError) as caught:
            program(disk)
        assert isinstance(caught.value, NoSpace) == (kind is FaultKind.NO_SPACE)
        assert disk.mount().list("/") == (["shard"] if operation.operation == "sync_dir" else [])
