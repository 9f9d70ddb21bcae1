"""`ff reliability simulate` prints both arms of each factor, as a table and as JSON."""

from __future__ import annotations

import json

import pytest

from fireflyer.cli.main import main

SMALL = ["reliability", "simulate", "--nodes", "40", "--days", "8", "--large", "64", "--rate", "40"]


def test_json_has_an_object_for_each_factor_without_and_with_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--factor", "5", "--factor", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["lemon_factor"], one["loop"]) for one in found] == [(5, False), (5, True), (20, False), (20, True)]
    for one in found:
        large = one["large"]
        assert large["failed"] == large["by_fault"] + large["by_same_fault"] + large["by_check"]
        assert (one["lemons"] is not None) == one["loop"]


def test_another_seed_is_another_fleet_and_the_table_has_a_column_for_each_arm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = []
    for seed in ("1", "2"):
        assert main([*SMALL, "--factor", "20", "--seed", seed]) == 0
        shown.append(capsys.readouterr().out.splitlines()[1:])
    assert shown[0] != shown[1]
    assert shown[0][0].split() == ["20x", "off", "20x", "on"]


def test_a_cluster_without_lemons_is_simulated_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--factor", "20", "--lemon-share", "0", "--json"]) == 0
    on = json.loads(capsys.readouterr().out)[1]
    assert on["lemons"]["lemons"] == 0
    assert on["lemons"]["recall"] is None
