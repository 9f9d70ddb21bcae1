"""Whatever bytes come, a decoder raises what `DECODE_ERRORS` names, and whoever decodes catches all of it."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from tests.golden.pinned.codecs import decode
from tests.golden.pinned.registry import FORMATS, Format

from fireflyer.base.decoding import DECODE_ERRORS

ROOT = Path(__file__).parents[3]
OWNER = "src/fireflyer/base/decoding.py"
DEPTH = 5_000
HOSTILE = {
    "msgpack": (
        b"\x81\xa1?" + b"\x91" * DEPTH,
        b"\x91" * DEPTH,
        b"\x81\xa0" * DEPTH,
        b"\xc1",
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xa1\xff",
    ),
    "json": (b'{"?":' + b"[" * DEPTH, b"[" * DEPTH, b'{"":' * DEPTH, b"\xff", b"", b'"\xff"', b"1e999"),
}


@pytest.mark.parametrize("form", [form for form in FORMATS if form.codec != "toml"], ids=lambda form: form.name)
def test_hostile_bytes_of_every_format_raise_what_is_named(form: Format) -> None:
    for data in HOSTILE["msgpack" if form.codec == "msgpack" else "json"]:
        with pytest.raises(DECODE_ERRORS):
            decode(form.codec, data, form.kind)


def caught_errors(source: str) -> list[int]:
    """The lines with an `except` of one of msgspec's errors of decoding."""
    names = ("DecodeError", "MsgspecError")
    if not any(name in source for name in names):
        return []
    handlers = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler) and node.type)
    return [
        handler.lineno
        for handler in handlers
        if any(isinstance(part, ast.Attribute) and part.attr in names for part in ast.walk(handler.type or handler))
    ]


def test_the_errors_of_a_decoder_are_caught_by_their_common_name() -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "src/*.py"]
    paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(paths) > 300
    found = [f"{path}:{line}" for path in paths if path != OWNER for line in caught_errors((ROOT / path).read_text())]
    assert not found, f"catch DECODE_ERRORS of {OWNER}: {found}"


@pytest.mark.parametrize("clause", ["msgspec.DecodeError", "(OSError, msgspec.DecodeError)", "msgspec.MsgspecError"])
def test_an_error_of_msgspec_that_is_caught_by_itself_is_found(clause: str) -> None:
    assert caught_errors(f"try:\n    pass\nexcept {clause}:\n    pass\n") == [3]
