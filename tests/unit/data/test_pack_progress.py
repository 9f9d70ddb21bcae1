"""`ff data pack` shows how far it is on a terminal, and nothing of that elsewhere."""

from __future__ import annotations

import os
import pty
import threading
from pathlib import Path

import pytest

from fireflyer.cli.main import main

RECORDS = 600


def command(tmp_path: Path) -> list[str]:
    source = tmp_path / "lines.jsonl"
    source.write_text("".join(f'{{"text": "record {number}"}}\n' for number in range(RECORDS)))
    return ["data", "pack", "-f", "jsonl", "--field", "text", str(source), str(tmp_path / "set")]


def test_a_terminal_shows_bytes_and_records_of_what_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                shown.extend(os.read(ours, 4096))
            except OSError:  # the other side is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        code = main(command(tmp_path))
        monkeypatch.undo()
    reader.join()
    os.close(ours)
    text = shown.decode()
    assert code == 0
    assert "Packing set" in text
    assert " 0 records" in text
    assert "512 records" in text, "every 256 records"
    assert "KiB" in text


def test_a_file_gets_no_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path)) == 0
    assert capsys.readouterr().err == ""
