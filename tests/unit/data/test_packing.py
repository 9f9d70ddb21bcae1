"""Packing: every value becomes a record or an error that names its place; whatever ends a pack, it goes on there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.packing import LINES, Watch, content, files, jsonl, parquet, run

from fireflyer.base.errors import DataCorruption, Exists, NotFound, PermanentError, UsageError
from fireflyer.data import END_OF_TEXT, BpeTokenizer, RecordSet
from fireflyer.data import places as places_module
from fireflyer.data.packing import InvalidInput, encoding_of
from fireflyer.data.packing.packer import MAX_TOLD
from fireflyer.data.shard_format import largest_record
from fireflyer.fs.tools.trees import LocalFile
from fireflyer.runtime.disk import RealDisk

pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture
def lines(tmp_path: Path) -> str:
    return jsonl(tmp_path / "lines.jsonl", [{"n": number, "text": text} for number, text in enumerate(LINES)])


def test_a_field_of_each_line_is_a_record(tmp_path: Path, lines: str) -> None:
    watch = Watch()
    packed = run(lines, tmp_path / "new" / "set", watch)
    assert content(tmp_path / "new" / "set") == [text.encode() for text in LINES]
    assert packed.shards > 1
    assert (packed.records, packed.data_bytes) == (120, sum(map(len, LINES)))
    assert (watch.records, watch.bytes, watch.total) == (120, os.path.getsize(lines), os.path.getsize(lines))
    with RecordSet(str(tmp_path / "new" / "set")) as records:
        assert records.meta == {
            "format": "jsonl", "encoding": "bytes", "inputs": 1, "field": "text", "skipped": 0,
            "source_bytes": os.path.getsize(lines),
        }  # fmt: skip
        with pytest.raises(UsageError, match="have no names"):
            records.name(0)


def test_whole_lines_keep_their_bytes_and_empty_ones_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1.50}\r\n\n  \n["\\u00e9"]')
    run(str(tmp_path), tmp_path / "set", field=None)
    assert content(tmp_path / "set") == [b'{"a": 1.50}', b'["\\u00e9"]']


def test_each_file_is_a_record_with_its_name(tmp_path: Path) -> None:
    names = {"b.bin": b"\0\1", "a/long name": b"", "a/é\udcff": b"x" * 3000, "c": b"y" * 3000}
    root = tmp_path / "files"
    for name, data in names.items():
        path = Path(os.fsdecode(os.fsencode(str(root / name))))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / ".hidden").write_text("no")
    (root / "link").symlink_to(root / "c")
    run(str(root), tmp_path / "set", format="files", field=None)
    with RecordSet(str(tmp_path / "set")) as records:
        assert len(records.shards) == 2
        assert {records.name(at): bytes(records[at]) for at in range(len(records))} == names
        assert [records.name(at) for at in range(4)] == sorted(names, key=os.fsencode)


def test_text_becomes_tokens_and_lists_are_tokens_already(tmp_path: Path) -> None:
    tokenizer = BpeTokenizer.train(LINES, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    values = ["line 3", [5, 299], "", [], [7, END_OF_TEXT]]
    source = jsonl(tmp_path / "a.jsonl", [{"text": value} for value in values])
    run(source, tmp_path / "set", encoding=encoding_of(str(tmp_path / "tokenizer.json")))
    with RecordSet(str(tmp_path / "set")) as records:
        rows = [records.array(at, np.dtype("<u2")).tolist() for at in range(5)]
        end = [END_OF_TEXT]
        assert rows == [[*tokenizer.encode("line 3"), *end], [5, 299, *end], end, end, [7, *end]]
        assert records.meta["vocab_size"] == tokenizer.vocab_size == 300
    with pytest.raises(InvalidInput, match=r"a\.jsonl:2: field 'text' is a list of .* integers from 0 to 256"):
        run(source, tmp_path / "other", encoding=encoding_of("bytes"))
    plain = jsonl(tmp_path / "b.jsonl", [{"text": "line 3"}, {"text": [5]}, {"text": []}])
    run(plain, tmp_path / "plain", encoding=encoding_of("bytes", end_of_text=False))
    assert content(tmp_path / "plain") == [np.frombuffer(b"line 3", np.uint8).astype("<u2").tobytes(), b"\5\0", b""]
    run(jsonl(tmp_path / "c.jsonl", [{"text": [5, 65535]}]), tmp_path / "bytes")
    assert content(tmp_path / "bytes") == [b"\5\0\xff\xff"]


def test_rows_of_parquet_are_records(tmp_path: Path) -> None:
    one = parquet(tmp_path / "a.parquet", {"text": LINES, "n": list(range(120)), "ids": [[1, 2]] * 120})
    run(one, tmp_path / "text", format="parquet", field=None, columns=("text",))
    assert content(tmp_path / "text") == [text.encode() for text in LINES]
    run(one, tmp_path / "ids", format="parquet", field=None, columns=("ids",))
    assert content(tmp_path / "ids")[5] == b"\1\0\2\0"
    run(one, tmp_path / "both", format="parquet", field=None, columns=("n", "text"))
    assert msgspec.json.decode(content(tmp_path / "both")[7]) == {"n": 7, "text": LINES[7]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"text":"a"}\n{bad\n', r"a\.jsonl:2: is not JSON: "),
        (b'{"text":"a"}\n\n[1]\n', r"a\.jsonl:3: is not an object with a field 'text'"),
        (b'{"txt":"a","b":1}', r"a\.jsonl:1: has no field 'text'; its fields: 'txt', 'b'"),
        (b'{"text":null}', r"a\.jsonl:1: field 'text' is null, not text"),
        (b'{"text":[1,70000]}', r"a\.jsonl:1: field 'text' is a list of something else than tokens"),
        (b'{"text":[1,"a"]}', r"a\.jsonl:1: field 'text' is a list of something else than tokens"),
        (b'{"text":[[1],[2,3]]}', r"a\.jsonl:1: field 'text' is a list of something else than tokens"),
        (b'{"text":[[]]}', r"a\.jsonl:1: field 'text' is a list of something else than tokens"),
        (b'{"text":[1,true]}', r"a\.jsonl:1: field 'text' is a list of something else than tokens"),
        (b'{"text":[1.0]}', r"a\.jsonl:1: field 'text' is a list of something else than tokens"),
        (b'{"text":[-1]}', r"a\.jsonl:1: field 'text' is a list of something else than tokens"),
        (b'{"text":"\xff"}', r"a\.jsonl:1: is not JSON: "),
        (b'{"text":"\\ud800"}', r"a\.jsonl:1: field 'text' holds half a surrogate pair at character 0"),
        (b"[" * 100_000, r"a\.jsonl:1: is not JSON: "),
    ],
)
def test_a_wrong_line_is_named_and_may_be_left_out(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text)
    with pytest.raises(InvalidInput, match=said) as caught:
        run(str(tmp_path / "a.jsonl"), tmp_path / "set")
    assert "\n" not in str(caught.value)
    watch = Watch()
    packed = run(str(tmp_path / "a.jsonl"), tmp_path / "set", watch, skip_invalid=True)
    assert (packed.skipped, packed.records) == (1, text.count(b'"a"}\n'))
    assert len(watch.problems) == 1
    with RecordSet(str(tmp_path / "set")) as records:
        assert records.meta["skipped"] == 1


def test_a_corrected_file_goes_on_after_the_shards_that_are_done(tmp_path: Path, lines: str) -> None:
    path = Path(lines)
    right = path.read_bytes()
    broken = right.replace(b'{"n":100,', b'{"n":100;')
    path.write_bytes(broken)
    with pytest.raises(InvalidInput, match=r"lines\.jsonl:101: is not JSON"):
        run(lines, tmp_path / "set")
    assert sum(name.endswith(".ffr") for name in files(tmp_path / "set")) >= 1
    with pytest.raises(NotFound):
        RecordSet(str(tmp_path / "set"))
    path.write_bytes(right)
    packed = run(lines, tmp_path / "set")
    assert packed.continued > 0
    assert content(tmp_path / "set") == [text.encode() for text in LINES]


def test_what_was_packed_must_not_have_changed(tmp_path: Path, lines: str) -> None:
    path = Path(lines)
    right = path.read_bytes()
    path.write_bytes(right + b"{bad")
    with pytest.raises(InvalidInput):
        run(lines, tmp_path / "set")
    path.write_bytes(right.replace(b'{"n":1,', b'{"n":7,'))
    with pytest.raises(UsageError, match=r"the first \d+ lines of .* have changed .* --restart"):
        run(lines, tmp_path / "set")
    path.write_bytes(right)
    with pytest.raises(UsageError, match="other inputs or options"):
        run(lines, tmp_path / "set", field="n")
    with pytest.raises(UsageError, match="other inputs or options"):
        run([lines, lines], tmp_path / "set")
    run(lines, tmp_path / "set", restart=True, shard_bytes=8192)
    assert content(tmp_path / "set") == [text.encode() for text in LINES]


class Killed(BaseException):
    """Of a process that is gone: nothing of it runs any more."""


class DyingDisk(RealDisk):
    """Its process dies at operation `left`, before it or after it; nothing it does then has an effect."""

    def __init__(self, left: int, *, after: bool) -> None:
        self.left, self.after, self.dead = left, after, False

    def _do(self, operation: Any, *arguments: Any) -> Any:
        if self.dead:
            raise Killed
        self.left -= 1
        self.dead = self.left < 0
        if self.dead and not self.after:
            raise Killed
        found = operation(*arguments)
        if self.dead:
            raise Killed
        return found

    def create(self, path: str, *, direct: bool = False) -> Any:
        return self._do(super().create, path)

    def rename(self, source: str, target: str) -> None:
        self._do(super().rename, source, target)

    def remove(self, path: str) -> None:
        self._do(super().remove, path)

    def mkdir(self, path: str) -> None:
        self._do(super().mkdir, path)

    def rmdir(self, path: str) -> None:
        self._do(super().rmdir, path)

    def exists(self, path: str) -> bool:
        if self.dead:
            raise Killed
        return super().exists(path)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("form", ["jsonl", "files", "parquet"])
def test_a_pack_that_dies_anywhere_goes_on_to_the_same_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Before and after each operation that changes names; nobody sees a data set until it is whole."""
    source = tmp_path / "source"
    source.mkdir()
    if form == "parquet":
        parquet(source / "a.parquet", {"text": LINES[:40]})
        parquet(source / "b.parquet", {"text": LINES[40:]}, rows=50)
    for number in range(0, 120, 40):
        if form == "jsonl":
            jsonl(source / f"{number:03}.jsonl", [{"text": text} for text in LINES[number : number + 40]])
        elif form == "files":
            (source / f"{number:03}").write_bytes(b"x" * 3000)
    options: dict[str, Any] = {"format": form} if form == "jsonl" else {"format": form, "field": None}
    run(str(source), tmp_path / "undisturbed", **options)
    wanted = files(tmp_path / "undisturbed")
    assert len(wanted) > 2
    died = True
    left = 0
    while died:
        died = False
        for after in (False, True):
            target = tmp_path / f"set-{left}-{after}"
            disk = DyingDisk(left, after=after)
            with monkeypatch.context() as patched:
                patched.setattr(places_module, "default_disk", lambda given, disk=disk: given or disk)
                try:
                    run(str(source), target, **options)
                except Killed:
                    died = True
            if (target / "dataset.json").exists():
                with pytest.raises(Exists, match="holds a data set already"):
                    run(str(source), target, **options)
            else:
                run(str(source), target, **options)
            assert files(target) == wanted
        left += 1
    assert left > 8


def test_a_directory_with_foreign_shards_is_left_alone(tmp_path: Path, lines: str) -> None:
    target = tmp_path / "set"
    target.mkdir()
    (target / "shard-00000.ffr").write_bytes(b"precious")
    with pytest.raises(Exists, match=r"shard-00000\.ffr, which is of no data set"):
        run(lines, target)
    assert (target / "shard-00000.ffr").read_bytes() == b"precious"


def test_a_damaged_state_file_is_said(tmp_path: Path, lines: str) -> None:
    target = tmp_path / "set"
    target.mkdir()
    for text in (b"", b"{}", b'{"crc32c":1,"body":{}}'):
        (target / ".packing.json").write_bytes(text)
        with pytest.raises(DataCorruption, match=r"\.packing\.json: .*--restart"):
            run(lines, target)
    run(lines, target, restart=True)
    assert content(target) == [text.encode() for text in LINES]


@pytest.mark.parametrize("place", ["out", "deep/out", "", "link"])
def test_a_target_among_its_own_inputs_is_none_of_them(tmp_path: Path, place: str) -> None:
    """So that an interrupted pack finds the inputs of before."""
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "real").mkdir()
    (root / "link").symlink_to(root / "real")
    for number in range(4):
        (root / f"{number}").write_bytes(b"x" * 2000)

    def interrupt(watch: Watch) -> None:
        if watch.records == 3:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"format": "files", "field": None}
    with pytest.raises(KeyboardInterrupt):
        run(str(root), root / place, Watch(interrupt), **options)
    assert (root / place / "shard-00000.ffr").exists()
    assert run(str(root), root / place, **options).continued
    with RecordSet(str(root / place)) as records:
        assert [records.name(at) for at in range(len(records))] == ["0", "1", "2", "3"]


def test_a_read_that_fails_names_its_file(tmp_path: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, reads = LocalFile.read, [0]

    def failing(self: LocalFile, size: int | None = -1) -> bytes:
        reads[0] += 1
        if reads[0] == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, size)

    monkeypatch.setattr(LocalFile, "read", failing)
    for form, field in (("jsonl", "text"), ("files", None)):
        reads[0] = 0
        with pytest.raises(PermanentError, match=r"lines\.jsonl: the device failed"):
            run(lines, tmp_path / form, format=form, field=field)


def test_misuse_is_refused(tmp_path: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, said in (
        ({"format": "files"}, "a field is of JSONL"),
        ({"columns": ("a",)}, "columns are of Parquet"),
    ):
        with pytest.raises(UsageError, match=said):
            run(lines, tmp_path / "set", **options)
    with pytest.raises(NotFound, match="missing"):
        run(str(tmp_path / "missing"), tmp_path / "set")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match=r"holds no files that end in \.jsonl or \.ndjson"):
        run(str(tmp_path / "empty"), tmp_path / "set")
    with pytest.raises(UsageError, match="give a tokenizer"):
        encoding_of(None, end_of_text=False)
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(InvalidInput, match=r"a\.parquet: not a Parquet file"):
        run(str(tmp_path), tmp_path / "set", format="parquet", field=None)
    parquet(tmp_path / "a.parquet", {"a": [1], "b": [2]})
    for columns, said in (((), "has the columns a, b; say which"), (("c",), "has no column 'c'; its columns: a, b")):
        with pytest.raises(UsageError, match=said):
            run(str(tmp_path), tmp_path / "set", format="parquet", field=None, columns=columns, restart=True)
    with pytest.raises(InvalidInput, match=r"a\.parquet: row 1: column 'a' is a number"):
        run(str(tmp_path), tmp_path / "set", format="parquet", field=None, columns=("a",), restart=True)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"not installed; run: pip install 'fireflyer\[parquet\]'"):
        run(str(tmp_path), tmp_path / "set", format="parquet", field=None, columns=("a",), restart=True)


def test_few_of_many_wrong_lines_are_told(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [None] * (MAX_TOLD + 50))
    watch = Watch()
    packed = run(source, tmp_path / "set", watch, skip_invalid=True)
    assert (packed.skipped, packed.records, len(watch.problems)) == (MAX_TOLD + 50, 0, MAX_TOLD)


def test_a_command_that_was_wrong_leaves_nothing_and_is_corrected(tmp_path: Path, lines: str) -> None:
    with pytest.raises(InvalidInput, match="has no field 'txt'"):
        run(lines, tmp_path / "set", field="txt")
    assert not (tmp_path / "set").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidInput, match="has no field 'txt'"):
        run(lines, tmp_path / "mine", field="txt")
    assert list((tmp_path / "mine").iterdir()) == []
    run(lines, tmp_path / "set")
    assert len(content(tmp_path / "set")) == 120


def test_a_record_larger_than_a_shard_is_an_input_that_is_told_or_left_out(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "x" * 5000}, {"text": "b"}])
    said = r"a.jsonl:2: a record of 4.9 KiB, and a shard takes 3.9 KiB; give a larger --shard-size"
    with pytest.raises(InvalidInput, match=said):
        run(source, tmp_path / "set")
    watch = Watch()
    assert run(source, tmp_path / "set", watch, skip_invalid=True).skipped == 1
    assert content(tmp_path / "set") == [b"a", b"b"]


def test_the_largest_record_fits_and_one_byte_more_does_not(tmp_path: Path) -> None:
    most = largest_record(4096)
    run(jsonl(tmp_path / "a.jsonl", [{"text": "x" * most}]), tmp_path / "set")
    assert content(tmp_path / "set") == [b"x" * most]
    with pytest.raises(InvalidInput, match="give a larger --shard-size"):
        run(jsonl(tmp_path / "b.jsonl", [{"text": "x" * (most + 1)}]), tmp_path / "other")


def test_a_fifo_in_place_of_a_shard_is_refused_at_once(tmp_path: Path, lines: str) -> None:
    """Its reader would wait for a writer for ever."""
    run(lines, tmp_path / "set")
    (tmp_path / "set" / "shard-00000.ffr").unlink()
    os.mkfifo(tmp_path / "set" / "shard-00000.ffr")
    with pytest.raises(UsageError, match=r"shard-00000.ffr"), RecordSet(str(tmp_path / "set")) as records:
        records[0]
