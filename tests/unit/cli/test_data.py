"""`ff data`: one clear line for what is wrong, exit codes, and no torch or fsspec behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fireflyer.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def packed(tmp_path: Path, capsys: Capture) -> Path:
    lines = b"".join(b'{"text":"%s"}\n' % (b"x" * at) for at in range(100))
    (tmp_path / "a.jsonl").write_bytes(lines)
    target = tmp_path / "set"
    arguments = ["-f", "jsonl", "--field", "text", "--shard-size", "4KiB", str(tmp_path / "a.jsonl"), str(target)]
    assert main(["data", "pack", *arguments]) == 0
    return target


def test_pack_info_verify(packed: Path, capsys: Capture) -> None:
    assert "100 records (4.8 KiB) in 2 shards" in capsys.readouterr().out
    assert main(["data", "info", str(packed)]) == 0
    said = capsys.readouterr().out
    assert "records       100\n" in said
    assert "lengths       0 to 99 bytes\n" in said
    assert "          64 to 127                36  ########" in said
    assert main(["data", "info", "--json", str(packed)]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert (found["records"], found["data_bytes"], len(found["shards"])) == (100, 4950, 2)
    assert sum(one["records"] for one in found["lengths"]["ranges"]) == 100
    assert main(["data", "verify", str(packed)]) == 0
    assert capsys.readouterr().out == "100 records (4.8 KiB): all are as they were written\n"


def test_verify_names_what_is_damaged_and_fails(packed: Path, capsys: Capture) -> None:
    shard = packed / "shard-00000.ffr"
    content = bytearray(shard.read_bytes())
    content[16] ^= 1
    shard.write_bytes(content)
    (packed / "shard-00001.ffr").unlink()
    capsys.readouterr()
    assert main(["data", "verify", str(packed)]) == 1
    first, second, last = capsys.readouterr().err.splitlines()
    assert f"error: {shard}: record 1 has CRC32C" in first
    assert "shard-00001.ffr: no such file" in second
    assert last == f"error: {packed}: 2 parts of the data set missing or damaged"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["info", "nowhere"], 1, "nowhere is no data set: there is no dataset.json in it; `ff data pack` makes one"),
        (["verify", "a.jsonl"], 1, "a.jsonl is no data set: there is no dataset.json in it"),
        (["pack", "a.jsonl", "a.jsonl"], 1, "a.jsonl is a file; the data set needs a directory"),
        (["pack", "--shard-size", "5QB", "a.jsonl", "set2"], 2, "--shard-size: size '5QB' is not understood"),
        (["pack", "nothing", "set2"], 1, "nothing: no such file"),
        (["pack", "a.jsonl", "set"], 1, "set holds a data set already"),
        (["pack", "--field", "x", "a.jsonl", "set2"], 2, "a field is of JSONL; the format is files"),
        (["pack", "--shard-size", "1B", "a.jsonl", "set2"], 2, "--shard-size 1B: it must be 4.0 KiB to 256.0 GiB"),
        (["pack", "-f", "jsonl", "--tokenizer", "none", "a.jsonl", "set2"], 1, "tokenizer 'none' is no file; give"),
        (
            ["pack", "-f", "jsonl", "--field", "y", "a.jsonl", "set2"],
            1,
            "a.jsonl:1: has no field 'y'; its fields: 'text'",
        ),
        (["pack", "a.jsonl"], 2, "Missing argument"),
    ],
)
def test_errors_are_one_line(
    packed: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(packed.parent)
    capsys.readouterr()
    assert main(["data", *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_no_torch_and_no_fsspec_is_needed(packed: Path) -> None:
    program = """
import sys
for name in ("torch", "fsspec", "pyarrow", "pandas"):
    sys.modules[name] = None
from fireflyer.cli.main import main
assert main(["data", "verify", sys.argv[1]]) == 0
assert main(["data", "pack", sys.argv[1], sys.argv[1] + "-again"]) == 0
from fireflyer.data import MixtureSampler, RecordLoader
"""
    subprocess.run([sys.executable, "-c", program, str(packed)], check=True, timeout=100)
