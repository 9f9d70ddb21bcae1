"""Messages, files and rows are encoded as they were when they were recorded, whatever classes and fields are called.

A test that fails here says what changed. Either the change is taken back (`msgspec.field(name=…)` keeps the name of a
field that is renamed, `tag=` that of a class), or it is meant, and the format gets a new revision: see
`pinned/registry.py`. Recorded data are never edited.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.golden.pinned import decoders
from tests.golden.pinned.codecs import decode, encode
from tests.golden.pinned.decoders import decoded_types
from tests.golden.pinned.layout import Layout, layout, moved, structs_of
from tests.golden.pinned.recorded import WIRE, Recorded, data_file, read_record
from tests.golden.pinned.registry import FORMATS

BY_NAME = {form.name: form for form in FORMATS}


@functools.cache
def recorded_now(name: str) -> Recorded:
    """What is recorded of the revision that is written now."""
    return read_record(BY_NAME[name], BY_NAME[name].revision)


@functools.cache
def layout_now(name: str) -> Layout:
    return layout(BY_NAME[name].kind)


@pytest.mark.parametrize("name", BY_NAME)
def test_names_tags_and_order_of_fields_are_those_recorded(name: str) -> None:
    recorded, now = recorded_now(name).layout, layout_now(name)
    for number, (was, row) in enumerate(zip(recorded.rows, now.rows, strict=False)):
        assert row == was, (
            f"{name}, #{number}: {now.classes[number]} is encoded otherwise than {recorded.classes[number]} was"
        )
    assert (now.root, now.rows) == (recorded.root, recorded.rows), name


@pytest.mark.parametrize("name", BY_NAME)
def test_fields_by_position_and_values_of_enumerations_do_not_change_places(name: str) -> None:
    recorded, now = recorded_now(name).layout, layout_now(name)
    for was, is_now in zip(recorded.order, now.order, strict=True):
        for before, after in zip(was, is_now, strict=False):
            assert not moved(before, after), f"{name}: {moved(before, after)} of {before} stand elsewhere in {after}"
    for values, was_called in recorded.enumerations.items():
        for old, new in zip(was_called, now.enumerations.get(values, []), strict=False):
            changed = [one for one in old if one in new and new[one] != old[one]]
            assert not changed, f"{name}: {changed} have other values than in {old}"


@pytest.mark.parametrize("name", BY_NAME)
def test_recorded_bytes_are_decoded_and_encoded_to_the_same_bytes(name: str) -> None:
    form, recorded = BY_NAME[name], recorded_now(name)
    assert recorded.samples, f"{name} has no samples"
    for sample in recorded.samples:
        assert encode(form.codec, decode(form.codec, sample, form.kind)) == sample


@pytest.mark.parametrize("name", BY_NAME)
def test_every_class_of_a_format_is_in_its_samples(name: str) -> None:
    form = BY_NAME[name]
    seen: dict[type, None] = {}
    for sample in recorded_now(name).samples:
        seen |= dict.fromkeys(map(type, _parts(decode(form.codec, sample, form.kind))))
    missing = [kind.__name__ for kind in structs_of(form.kind) if kind not in seen]
    assert not missing, f"no sample of {name} holds {missing}"


def test_older_revisions_are_decoded() -> None:
    for form in FORMATS:
        for revision in range(form.oldest, form.revision):
            for sample in read_record(form, revision).samples:
                decode(form.codec, sample, form.kind)


def test_every_type_that_the_code_decodes_is_recorded() -> None:
    known = [(form.codec, form.kind) for form in FORMATS]
    unknown = [one for one in decoded_types() if (one.codec, one.kind) not in known]
    assert not unknown, "\n".join(
        f"{one.where} decodes {one.codec} of {one.kind}, which is in no format: add one to"
        " tests/golden/pinned/registry.py"
        " (or change the right side of its line, if this is a class that was renamed or moved), then run"
        " python -m tests.golden.pinned.record --add"
        for one in unknown
    )


@pytest.mark.parametrize(
    "body",
    [
        "import msgspec.json as other\n    return other.decode(data, type=int)",
        "return data.codec.decode(data, type=int)",
        "return data.codec.Decoder(int)",
        "return msgspec.json.decode(data, type=int)",
        "return msgspec.msgpack.Decoder(int).decode(data)",
        "return msgspec.convert(data, int)",
        "from fireflyer.base.decoding import decode_json\n    return decode_json(data)",
        "from fireflyer.base.decoding import decode_json\n    return decode_json(data, data.kind)",
    ],
)
def test_a_decoder_that_cannot_be_followed_is_an_error(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = decoders.Module(decoders.ROOT / "base/events.py", f"import msgspec\ndef read(data):\n    {body}\n")
    monkeypatch.setattr(decoders, "modules", lambda: (module,))
    with pytest.raises(ValueError, match=r"base/events.py:[34]\b"):
        decoders.decoded_types()


def test_recorded_data_and_registry_name_the_same_formats() -> None:
    wanted = [data_file(form.name, revision) for form in FORMATS for revision in range(form.oldest, form.revision + 1)]
    assert len(BY_NAME) == len(FORMATS)
    missing = sorted(path.name for path in wanted if not path.exists())
    assert not missing, f"not recorded yet, run python -m tests.golden.pinned.record --add: {missing}"
    unused = sorted(path.name for path in WIRE.glob("*.jsonl") if path not in wanted)
    assert not unused, f"recorded, and in no format of tests/golden/pinned/registry.py any more: {unused}"


def _parts(value: Any) -> Iterator[Any]:
    """The value and all that is in it."""
    yield value
    inner: Any = ()
    if isinstance(value, msgspec.Struct):
        inner = (getattr(value, name) for name in value.__struct_fields__)
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for part in inner:
        yield from _parts(part)
