"""`ff reliability mttf` and `ettr`."""

from __future__ import annotations

import json

import pytest

from fireflyer.cli.main import main

Capture = pytest.CaptureFixture[str]


def test_mttf_of_sizes(capsys: Capture) -> None:
    assert main(["reliability", "mttf", "--gpus", "1024", "--gpus", "16384", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [round(row["mttf_s"] / 3600, 1) for row in found] == [28.8, 1.8]
    assert main(["reliability", "mttf", "--gpus", "1024"]) == 0
    assert "28.85 h" in capsys.readouterr().out


def test_a_cluster_without_failures_never_fails(capsys: Capture) -> None:
    assert main(["reliability", "mttf", "--gpus", "8", "--rate", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["mttf_s"] is None
    assert main(["reliability", "ettr", "--gpus", "8", "--rate", "0"]) == 2
    assert "give a rate above 0" in capsys.readouterr().err


def test_published_figures_that_do_not_follow_are_printed_as_such(capsys: Capture) -> None:
    assert main(["reliability", "mttf", "--published"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("does not follow") == 5
    (october,) = (line for line in shown.splitlines() if "2023-10" in line)
    assert [cell.strip() for cell in october.split("│")][2:4] == ["29", "13"]
    assert main(["reliability", "mttf", "--published", "--json"]) == 0
    wrong = [row for row in json.loads(capsys.readouterr().out) if row["verdict"] != "follows"]
    assert [(row["printed"], row["computed"]) for row in wrong if row["paper"] == "arXiv:2408.14158"] == [("29", 13)]


def test_ettr_and_what_it_needs(capsys: Capture) -> None:
    words = ["reliability", "ettr", "--gpus", "12000", "--stall", "10s", "--simulate", "20", "--seed", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] == pytest.approx(0.9215, abs=5e-4)
    assert found["simulated"]["ettr"] == pytest.approx(found["exact"], rel=0.01)
    assert found["daly_young_period_s"] == pytest.approx(421, abs=0.5)
    assert found["requirements"]["nodes"] > 1500
    assert main(words) == 0
    assert "For an ETTR of 0.9 each of these alone suffices" in capsys.readouterr().out


def test_a_run_of_a_length_has_the_failures_of_equation_5(capsys: Capture) -> None:
    words = ["reliability", "ettr", "--gpus", "12000", "--stall", "10s", "--length", "240h"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["expected_failures"] == pytest.approx(240 * 3600 / found["mttf_s"] / found["expected"], rel=0.01)
    assert main(words) == 0
    assert "failures of a run" in capsys.readouterr().out
    assert main([*words[:-2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expected_failures"] is None


def test_what_suffices_is_told_for_the_period_and_the_wait_that_are_given(capsys: Capture) -> None:
    words = ["reliability", "ettr", "--gpus", "12000", "--stall", "10s"]
    assert main([*words, "--period", "30m"]) == 0
    shown = capsys.readouterr().out
    assert "with a checkpoint every 30 min 00 s" in shown
    assert "stall of a checkpoint     none suffices" in shown
    assert "restart                   none suffices" in shown, "0.867 is reached with 5 min, and 0.896 with none"
    assert main([*words, "--period", "30m", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] == pytest.approx(0.867, abs=5e-4)
    assert found["requirements"]["nodes"] < 1500
    assert found["requirements"]["failures_per_node_day"] < 6.5e-3
    assert main([*words, "--queue", "4h"]) == 0
    shown = capsys.readouterr().out
    assert "of long jobs that wait for 4 h 00 min before each start" in shown
    assert "wait before each start" in shown
    assert main([*words, "--queue", "4h", "--json"]) == 0
    waiting = json.loads(capsys.readouterr().out)
    assert waiting["exact"] == pytest.approx(waiting["expected"], rel=0.01)
    assert waiting["requirements"]["nodes"] < 200


def test_a_ratio_that_no_period_gives_is_told(capsys: Capture) -> None:
    assert main(["reliability", "ettr", "--gpus", "131072", "--restart", "20m"]) == 0
    shown = capsys.readouterr().out
    assert "none suffices: the best one gives 0.0" in shown
    assert main(["reliability", "ettr", "--gpus", "8", "--target", "1"]) == 2
