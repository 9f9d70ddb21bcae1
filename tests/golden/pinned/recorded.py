"""The recorded data of a format: a file of JSON lines that is written once.

    {"format": NAME, "codec": "msgpack", "root": "#1 | #2"}
    {"row": 0, "class": "Register", "tag": {"type": "Register"}, "fields by name": [["node", "int"], …]}
    {"row": 1, "class": "Member", "order": [["target", "epoch"]], "fields by position": [["int"], ["int"]]}
    {"enumerations": {"one of [1,2]": [{"FILE": 1, "DIRECTORY": 2}]}}
    {"sample": "…"}         text of JSON and TOML as it is, MessagePack in base64

`class` is what the class was called on the day of the record, for people; nothing compares it. `order` and
`enumerations` are what positions and values were called: names may change, and may not change places.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.golden.pinned.cases import Found
from tests.golden.pinned.codecs import encode, raw_sample
from tests.golden.pinned.given import GIVEN
from tests.golden.pinned.layout import Layout, layout
from tests.golden.pinned.registry import Codec, Format
from tests.golden.pinned.samples import samples

__all__ = ["CASES_FILE", "WIRE", "Recorded", "case_lines", "data_file", "new_record", "read_cases", "read_record"]

WIRE: Final = Path(__file__).parent.parent / "wire"
CASES_FILE: Final = WIRE.parent / "cases.jsonl"
"""What `cases.py` makes: `{"case": NAME, "part": NAME, "text" or "bytes": …}`, bytes in base64."""


class Recorded(msgspec.Struct):
    layout: Layout
    samples: list[bytes]


def data_file(name: str, revision: int = 1) -> Path:
    return WIRE / (f"{name}.jsonl" if revision == 1 else f"{name}.revision-{revision}.jsonl")


def new_record(form: Format) -> bytes:
    """The content of the file of a format that has none yet."""
    now = layout(form.kind)
    head: dict[str, Any] = {"format": form.name, "codec": form.codec, "root": now.root}
    lines = [head]
    for at, row in enumerate(now.rows):
        order = {"order": now.order[at]} if now.order[at] else {}
        lines.append({"row": at, "class": now.classes[at], **order, **row})
    if now.enumerations:
        lines.append({"enumerations": now.enumerations})
    values = samples(form.kind, raw_sample(form.codec), GIVEN)
    lines += [{"sample": _text(form.codec, encode(form.codec, value))} for value in values]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def read_record(form: Format, revision: int) -> Recorded:
    found = Recorded(Layout("", [], [], [], {}), [])
    for text in data_file(form.name, revision).read_bytes().splitlines():
        line = msgspec.json.decode(text)
        if "root" in line:
            found.layout.root = line["root"]
        elif "sample" in line:
            found.samples.append(_bytes(form.codec, line["sample"]))
        elif "enumerations" in line:
            found.layout.enumerations = line["enumerations"]
        else:
            del line["row"]
            found.layout.order.append(line.pop("order", []))
            found.layout.classes.append(line.pop("class"))
            found.layout.rows.append(line)
    return found


def case_lines(name: str, found: Found) -> bytes:
    parts = found if isinstance(found, Mapping) else {"": found}
    lines = []
    for part, value in parts.items():
        kept = {"text": value} if isinstance(value, str) else {"bytes": base64.b64encode(value).decode()}
        lines.append({"case": name, "part": part, **kept})
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def read_cases() -> dict[str, bytes]:
    """The lines of each case."""
    found: dict[str, bytes] = {}
    for line in CASES_FILE.read_bytes().splitlines(keepends=True) if CASES_FILE.exists() else ():
        name = msgspec.json.decode(line)["case"]
        found[name] = found.get(name, b"") + line
    return found


def _text(codec: Codec, data: bytes) -> str:
    return base64.b64encode(data).decode() if codec == "msgpack" else data.decode()


def _bytes(codec: Codec, text: str) -> bytes:
    return base64.b64decode(text) if codec == "msgpack" else text.encode()
