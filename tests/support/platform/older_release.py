"""`ff` of the release before, as far as others can tell: what it says and keeps has the fields of the recorded
revisions before the newest ones (`tests/golden/wire`), and it does not see newer ones.

    python -P older_release.py [--revision=N] manager CONFIG      and all other commands

With `--revision` it is a release of that revision of the agents' protocol instead (`cluster.schema.sync.REVISION`).
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["PROGRAM", "Older", "older_fields"]

PROGRAM = str(Path(__file__).resolve())
WIRE = Path(__file__).resolve().parents[2] / "golden" / "wire"
FORMATS = ("rpc.platform.*", "platform.row.*", "platform.ticket.*")


def older_fields() -> dict[str, set[str]]:
    """Class -> its encoded fields in the revision before the newest, of all formats that have one."""
    revisions: dict[str, list[Path]] = {}
    for path in [path for pattern in FORMATS for path in WIRE.glob(f"{pattern}jsonl")]:
        revisions.setdefault(path.name.removesuffix(".jsonl").partition(".revision-")[0], []).append(path)
    fields: dict[str, set[str]] = {}
    for paths in revisions.values():
        paths.sort(key=lambda path: int(path.stem.partition(".revision-")[2] or 1))
        for line in paths[-2].read_text().splitlines() if len(paths) > 1 else []:
            row = json.loads(line)
            if "fields by name" in row:
                names = {name for name, *_ in row["fields by name"]}
                fields[row["class"]] = fields.get(row["class"], names) & names
    return fields


class Older:
    def __init__(self, fields: dict[str, set[str]]) -> None:
        self._fields = fields

    def said(self, value: Any) -> Any:
        """As what msgspec encodes, without newer fields."""
        if isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like:
            config, known = value.__struct_config__, self._fields.get(type(value).__name__)
            pairs = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
            found = {name: self.said(getattr(value, own)) for name, own in pairs if known is None or name in known}
            return found if config.tag is None else {config.tag_field: config.tag, **found}
        if isinstance(value, msgspec.Struct):
            return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        if isinstance(value, dict):
            return {self.said(key): self.said(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.said(one) for one in value]
        return value.value if isinstance(value, enum.Enum) else value

    def heard(self, value: Any) -> Any:
        """With the defaults in the place of newer fields."""
        if isinstance(value, msgspec.Struct):
            known = self._fields.get(type(value).__name__)
            fields = msgspec.structs.fields(value)
            seen = {one.name: self.heard(getattr(value, one.name)) for one in fields}
            newer = [one for one in fields if known is not None and one.encode_name not in known]
            defaults = {
                one.name: one.default if one.default is not msgspec.NODEFAULT else one.default_factory()
                for one in newer
            }
            return msgspec.structs.replace(value, **{**seen, **defaults})
        if isinstance(value, tuple):
            return tuple(self.heard(one) for one in value)
        return value


def _install(older: Older) -> None:
    """Before any other module of the product takes these functions."""
    from fireflyer.kvstore.core import rows
    from fireflyer.runtime.rpc import messages

    encode, decode_row = messages.encode, rows.decode_row

    def decoding(kind: str) -> Callable[[Any, msgspec.Raw], Any]:
        def decode(method: Any, body: msgspec.Raw) -> Any:
            return older.heard(getattr(method, kind).decode(body))

        return decode

    def read(key: bytes, value: bytes, row_type: Any) -> Any:
        return older.heard(decode_row(key, value, row_type))

    setattr(messages, "encode", lambda message: encode(older.said(message)))  # noqa: B010
    setattr(messages.Method, "decode_request", decoding("_request_decoder"))  # noqa: B010
    setattr(messages.Method, "decode_response", decoding("_response_decoder"))  # noqa: B010
    setattr(rows, "encode_row", lambda row: bytes([rows.FORMAT]) + msgspec.msgpack.encode(older.said(row)))  # noqa: B010
    setattr(rows, "decode_row", read)  # noqa: B010


def _main(arguments: list[str]) -> int:
    if arguments[0].startswith("--revision="):
        from fireflyer.cluster.schema import sync

        setattr(sync, "REVISION", int(arguments.pop(0).partition("=")[2]))  # noqa: B010
    else:
        _install(Older(older_fields()))
    from fireflyer.cli.main import main

    return int(main(arguments) or 0)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
