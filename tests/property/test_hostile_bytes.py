"""Parsers of bytes from peers and from files return or raise what they declare, whatever the bytes.

Each gets right samples that were changed: `tests/support/fuzz` makes them and lists the parsers. A failure names parser
and number: `hostile_bytes(parser, number)` are the bytes again.
"""

from __future__ import annotations

import logging
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.campaigns.shards import campaign
from tests.support.fuzz.mutations import hostile
from tests.support.fuzz.parsers import PARSERS, Parser

INPUTS = 60
"""For each parser, times its weight."""
INPUTS_SLOW, INPUTS_WIDE = 1000, 6000
INPUT_S = 0.0003
"""Processor time of one, on average."""
MEASURED = 10
LEAST_BYTES, TIMES = 2 << 20, 300
"""A parser may take so much memory, and so many times the size of its input: an empty list has one byte on the wire
and 64 in memory, a class more. That is far below what one wrong length could ask for."""
LARGE_BYTES, LARGE_S = 1 << 20, 20.0
"""So much is parsed in so many seconds of processor time: linear takes far less, quadratic for bytes far more."""


def hostile_bytes(parser: Parser, number: int) -> bytes:
    return hostile(random.Random(f"{parser.name} {number}"), parser.samples)


class Faults(logging.Handler):
    """Errors of our own that were caught and logged: a parser has let something through that it should not."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@pytest.fixture
def faults() -> Iterator[Faults]:
    handler, log = Faults(), logging.getLogger("fireflyer")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def parse(parser: Parser, data: bytes, number: int, faults: Faults) -> None:
    try:
        parser.parse(data)
    except parser.errors:
        pass
    except BaseException as error:
        error.add_note(f"parser {parser.name!r}, input {number}: {data[:200]!r}")
        raise
    assert not faults.found, f"parser {parser.name!r}, input {number}, {data[:200]!r}: {faults.found[0]}"


@pytest.mark.parametrize("name", PARSERS)
def test_right_samples_are_parsed(name: str, faults: Faults) -> None:
    for number, sample in enumerate(PARSERS[name].samples):
        parse(PARSERS[name], sample, number, faults)


@pytest.mark.parametrize("name", PARSERS)
def test_hostile_bytes_end_in_a_declared_error(name: str, faults: Faults) -> None:
    parser = PARSERS[name]
    for number in range(INPUTS * parser.weight):
        parse(parser, hostile_bytes(parser, number), number, faults)


def many_inputs() -> Iterator[Any]:
    for parser in PARSERS.values():
        first, end = (min(inputs * parser.weight, parser.most) for inputs in (INPUTS_SLOW, INPUTS_WIDE))
        yield pytest.param(parser.name, range(first), id=parser.name, marks=pytest.mark.slow)
        if end > first:
            marks = campaign(expected_s=(end - first) * INPUT_S)
            yield pytest.param(parser.name, range(first, end), id=f"{parser.name}, {first} to {end}", marks=marks)


@pytest.mark.parametrize(("name", "inputs"), list(many_inputs()))
def test_many_more_hostile_bytes(name: str, inputs: range, faults: Faults) -> None:
    parser = PARSERS[name]
    for number in inputs:
        parse(parser, hostile_bytes(parser, number), number, faults)


@pytest.mark.parametrize("name", [name for name in PARSERS if not name.startswith("format")])
def test_memory_is_bounded_by_the_size_of_the_input(name: str, faults: Faults) -> None:
    parser = PARSERS[name]
    tracemalloc.start()
    try:
        for number in range(MEASURED):
            data = hostile_bytes(parser, number)
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            parse(parser, data, number, faults)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < LEAST_BYTES + TIMES * len(data), f"input {number} of {len(data)} bytes took {peak}"
    finally:
        tracemalloc.stop()


LARGE: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda sample: bytes(LARGE_BYTES),
    "one sample again and again": lambda sample: sample * (LARGE_BYTES // len(sample)),
    "arrays": lambda sample: b"\xdd" + (LARGE_BYTES).to_bytes(4, "big") + b"\x90" * LARGE_BYTES,
    "nested": lambda sample: b"[" * LARGE_BYTES,
    "text": lambda sample: b'"' + b"\\u0000" * (LARGE_BYTES // 6) + b'"',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("name", PARSERS)
def test_large_inputs_take_no_quadratic_time(name: str, kind: str, faults: Faults) -> None:
    parser = PARSERS[name]
    if name.startswith(("descriptions of memory", "addresses of UCX workers")):
        pytest.skip("the socket of the test holds less")
    data = LARGE[kind](parser.samples[0])
    began_s = time.process_time()
    parse(parser, data, 0, faults)
    assert time.process_time() - began_s < LARGE_S
