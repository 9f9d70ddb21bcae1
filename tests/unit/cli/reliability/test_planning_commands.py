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
    assert capsys.readouterr().out.count("does not follow") == 4


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


def test_a_ratio_that_no_period_gives_is_told(capsys: Capture) -> None:
    assert main(["reliability", "ettr", "--gpus", "131072", "--restart", "20m"]) == 0
    shown = capsys.readouterr().out
    assert "none suffices: the best one gives 0.0" in shown
    assert main(["reliability", "ettr", "--gpus", "8", "--target", "1"]) == 2
