"""A mutant is looked for at its recorded seed first, and a record that is out of date hides nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.campaigns import known_seeds
from tests.support.campaigns.known_seeds import Found, search


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The seeds that were tried. The record says 7 for the mutant `b` of the world `w`."""
    record = tmp_path / "mutants.json"
    record.write_text(json.dumps({"w": {"b": 7}}))
    monkeypatch.setattr(known_seeds, "RECORD", record)
    monkeypatch.delenv("FF_ACCEPT", raising=False)
    return []


def test_the_recorded_seed_is_the_first(asked: list[int]) -> None:
    def attempt(seed: int) -> str | None:
        asked.append(seed)
        return "wrong" if seed in (3, 7) else None

    assert search("w", "b", 20, attempt) == Found(7, "wrong")
    assert asked == [7]


@pytest.mark.parametrize("mutant", ["b", "a mutant without a record"])
def test_without_a_seed_that_finds_it_the_range_is_searched(asked: list[int], mutant: str) -> None:
    assert search("w", mutant, 20, lambda seed: "wrong" if seed == 5 else None) == Found(5, "wrong")


def test_a_mutant_that_no_seed_finds_is_an_error(asked: list[int]) -> None:
    with pytest.raises(AssertionError, match="no seed below 4 finds it"):
        search("w", "b", 4, lambda seed: "wrong" if seed >= 4 else None)


def test_seeds_are_recorded_where_that_is_asked_for(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_ACCEPT", "1")
    assert search("w", "b", 20, lambda seed: "wrong" if seed == 5 else None) == Found(5, "wrong")
    assert search("w", "c", 20, lambda seed: "wrong" if seed == 2 else None) == Found(2, "wrong")
    assert json.loads(known_seeds.RECORD.read_text()) == {"w": {"b": 5, "c": 2}}


def test_a_recorded_seed_that_still_finds_the_mutant_stays(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_ACCEPT", "1")
    assert search("w", "b", 20, lambda seed: "wrong" if seed in (3, 7) else None) == Found(7, "wrong")
    assert json.loads(known_seeds.RECORD.read_text()) == {"w": {"b": 7}}
