"""Whatever bytes come, a decoder raises what `DECODE_ERRORS` names, and whoever decodes catches all of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated, TypeGuard

import msgspec
import pytest
from tests.golden.pinned.codecs import decode
from tests.golden.pinned.registry import FORMATS, Format

from fireflyer.base.decoding import DECODE_ERRORS, convert, decode_json

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


# --- structs that threads use first ---

_CODECS = ("json", "msgpack", "toml", "yaml")


def decoded_elsewhere(source: str) -> list[int]:
    """The lines that name what decodes in msgspec, or give functions of `base.decoding` other names: calls of these are
    not found by the test that all decoded types are recorded."""
    if "msgspec" not in source and "base.decoding" not in source:
        return []
    tree = ast.parse(source)
    types = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    return [node.lineno for node in ast.walk(tree) if _decodes(node) and id(node) not in types]


def _decodes(node: ast.AST) -> TypeGuard[ast.expr | ast.stmt]:
    if isinstance(node, ast.ImportFrom):
        names = [one.name for one in node.names]
        codecs = [f"msgspec.{codec}" for codec in _CODECS]
        renamed = any(one.asname for one in node.names) or "*" in names
        return (
            (node.module == "msgspec" and bool({*names} & {*_CODECS, "convert", "*"}))
            or node.module in codecs
            or (node.module == "fireflyer.base.decoding" and renamed)
        )
    if isinstance(node, ast.Import):
        return any(one.name.startswith("msgspec") and (one.asname or one.name != "msgspec") for one in node.names)
    return isinstance(node, ast.Attribute) and ast.unparse(node) in (
        "msgspec.convert",
        *(f"msgspec.{codec}.{name}" for codec in _CODECS for name in ("decode", "Decoder")),
    )


def test_one_module_decodes() -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "src/*.py"]
    paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    found = [
        f"{path}:{line}" for path in paths if path != OWNER for line in decoded_elsewhere((ROOT / path).read_text())
    ]
    assert not found, f"use functions of {OWNER}, by their names: {found}"


@pytest.mark.parametrize(
    "line",
    [
        "msgspec.json.decode(data, type=int)",
        "read = msgspec.json.decode",
        "read = functools.partial(msgspec.convert, type=int)",
        "from msgspec.json import decode as read",
        "from msgspec import json",
        "import msgspec.json as codec",
        "import msgspec as other",
        "from fireflyer.base.decoding import decode_json as read",
    ],
)
def test_other_ways_to_decode_are_found(line: str) -> None:
    assert decoded_elsewhere(f"import msgspec\n\n{line}\n") == [3]


def test_types_and_other_uses_of_msgspec_are_not_decoding() -> None:
    assert decoded_elsewhere("import msgspec\nx: msgspec.json.Decoder[int]\nmsgspec.json.encode(data.decode())\n") == []


THREADS = """
import sys, threading, time
from typing import Annotated, Any
import msgspec
from fireflyer.base import decoding

class Slow:
    def __class_getitem__(cls, _: Any) -> Any:
        time.sleep(0.01)  # others run, while msgspec looks at the annotations
        return int

class Inner(msgspec.Struct):
    a: "Slow[0]" = 0
    b: "Slow[1]" = 0
    c: "Slow[2]" = 0

class Left(msgspec.Struct):
    inner: Inner

class Right(msgspec.Struct):
    inner: list[Inner]

NO_HASH = Annotated[Inner, {}]
CALLS = {
    "decode_json": lambda: decoding.decode_json(b'{"inner": {"b": 1}}', Left).inner.b,
    "decode_msgpack": lambda: decoding.decode_msgpack(msgspec.msgpack.encode({"inner": [{"b": 1}]}), Right).inner[0].b,
    "decode_toml": lambda: decoding.decode_toml("inner = {b = 1}", Left).inner.b,
    "convert": lambda: decoding.convert({"inner": [{"b": 1}]}, Right).inner[0].b,
    "json_decoder": lambda: decoding.json_decoder(Inner).decode(b'{"b": 1}').b,
    "unhashable": lambda: decoding.convert({"b": 1}, NO_HASH).b,
    "msgspec": lambda: msgspec.convert({"inner": {"b": 1}}, Left).inner.b,
}
start, found = threading.Barrier(12), []

def use(call: str) -> None:
    start.wait()
    found.append(CALLS[call]())

names = sys.argv[1].split()
threads = [threading.Thread(target=use, args=(names[number % len(names)],)) for number in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [1] * 12, found
"""


@pytest.mark.parametrize(
    "calls", ["decode_json", "decode_json decode_msgpack decode_toml convert json_decoder unhashable"]
)
def test_threads_may_use_a_struct_for_the_first_time_at_once(calls: str) -> None:
    """msgspec 0.22 publishes what it knows of a struct before that is complete. Whoever puts "msgspec" for `calls` sees
    the process end."""
    done = subprocess.run([sys.executable, "-c", THREADS, calls], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_child_process_decodes_while_its_parent_prepared_a_struct_in_another_thread() -> None:
    program = (
        THREADS.split("CALLS = ")[0]
        + """
import os
thread = threading.Thread(target=decoding.decode_json, args=(b'{"inner": {}}', Left))
thread.start()
child = os.fork()
if child == 0:
    os._exit(decoding.decode_json(b'{"inner": {"b": 7}}', Left).inner.b)
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_types_that_are_equal_share_a_decoder_and_those_without_a_hash_are_decoded_too() -> None:
    assert decode_json(b"[1]", list[int]) == decode_json(b"[1]", list[int]) == [1]
    with pytest.raises(DECODE_ERRORS):
        decode_json(b"[1]", list[bool])
    odd = Annotated[int, msgspec.Meta(ge=3), {}]
    assert decode_json(b"3", odd) == convert(3, odd) == 3
    with pytest.raises(DECODE_ERRORS):
        convert(2, odd)
