"""What Slurm 22.05 printed (recorded), and what its users could make it print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.cluster.core.slurm.output import (
    Phase,
    SlurmOutputError,
    parse_job_id,
    parse_jobs,
    parse_nodes,
    parse_preempted,
    plain,
)
from fireflyer.cluster.core.slurm.reasons import reason_words

NAME = "ff-2a2ca1c8e0f1b2a3c4d5e6f7"
WAITS = f"2|PENDING|0|1|N/A|N/A|1795480530||{NAME}|Dependency\n"
RUNS = f"1|RUNNING|1004|2|1795480531|NONE|1795480530|n[01-02],b|{NAME}|None\n"
ENDED = f"1|CANCELLED|0|2|1795480531|1795480533|1795480530|a,b|{NAME}|None\n"


def test_jobs_that_wait_run_and_have_ended() -> None:
    waits, runs, ended = parse_jobs(WAITS + RUNS + ENDED, [NAME])
    assert (waits.phase, waits.reason, waits.nodes, waits.start_s) == (Phase.WAITING, "Dependency", (), None)
    assert (runs.phase, runs.uid, runs.nodes, runs.end_s) == (Phase.RUNNING, 1004, ("n01", "n02", "b"), None)
    assert (ended.phase, ended.start_s, ended.end_s) == (Phase.ENDED, 1795480531, 1795480533)
    assert {job.submit_s for job in (waits, runs, ended)} == {1795480530}


def test_a_reason_keeps_the_parentheses_that_are_a_part_of_it() -> None:
    said = "Job's account not known, so it can't use this partition (test allows physics)"
    for reason, kept in ((said, said), ("(Priority)", "Priority")):
        (job,) = parse_jobs(WAITS.replace("Dependency", reason), [NAME])
        assert job.reason == kept


@pytest.mark.parametrize("state", ["COMPLETING", "CONFIGURING", "SUSPENDED", "A_STATE_OF_LATER_RELEASES"])
def test_nothing_follows_from_a_state_that_is_none_of_these(state: str) -> None:
    (job,) = parse_jobs(RUNS.replace("RUNNING", state), [NAME])
    assert job.phase is Phase.UNCLEAR


@pytest.mark.parametrize(
    "text",
    [
        "3|PENDING|0|3|N/A|N/A|1795480530||ev|il\nx|Resources\n",  # a name with a bar and a line break, as was printed
        RUNS.replace(NAME, "other"),
        RUNS.replace("1004", "root"),
        RUNS.replace("n[01-02],b", "n[1-99999999]"),
        RUNS.replace("n[01-02],b", "a;b"),
        RUNS.replace("RUNNING", "\x1b[31mRUNNING"),
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
        RUNS[:20],
    ],
)
def test_an_answer_with_a_line_that_was_not_asked_for_counts_as_none(text: str) -> None:
    with pytest.raises(SlurmOutputError):
        parse_jobs(WAITS + text, [NAME])


def test_nodes_with_the_reasons_that_administrators_wrote() -> None:
    text = (
        "a|allocated|none\nb|down*|Not responding\nc|drained|bad disk | x\nmore of it\nd|idle~|none\nc|drained|again\n"
    )
    nodes = {node.name: node for node in parse_nodes(text)}
    assert list(nodes) == ["a", "b", "c", "d"]
    assert (nodes["c"].drains, nodes["c"].reason) == (True, "bad disk | x")
    assert [name for name, node in nodes.items() if not node.is_certain] == ["b"]


def test_what_is_shown_is_one_line_without_control_characters() -> None:
    (node,) = parse_nodes("a|drained|\x1b[31mred\x07 alert" + "x" * 1000)
    assert "\x1b" not in node.reason
    assert len(node.reason) <= 200
    assert plain("a\nb\tc") == "a b c"


def test_jobs_that_slurm_preempts() -> None:
    """The blanks are Slurm's."""
    said = "1           1795701301              \n12          N/A                     \n"
    assert parse_preempted(said) == {1: 1795701301}
    for text in ("1 x\n", "x 1795701301\n", "1\n", "squeue: error: Invalid job format specification\n"):
        with pytest.raises(SlurmOutputError):
            parse_preempted(text)


def test_the_number_of_a_job() -> None:
    assert parse_job_id("17\n") == parse_job_id("17;cluster\n") == 17
    for text in ("", "17\n18\n", "Submitted batch job 17\n", "-1\n"):
        with pytest.raises(SlurmOutputError):
            parse_job_id(text)


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    for job in _read(text):
        assert job == NAME
    for node in parse_nodes(text):
        assert node.name.isascii()


def _read(text: str) -> list[str]:
    try:
        return [job.name for job in parse_jobs(text, [NAME])]
    except SlurmOutputError:
        return []


def test_reasons_keep_the_word_of_slurm() -> None:
    assert reason_words("Resources") == "no nodes are free for it yet (Resources)"
    assert reason_words("ReqNodeNotAvail, UnavailableNodes:n1").endswith("(ReqNodeNotAvail, UnavailableNodes:n1)")
    assert reason_words("QOSMaxNodePerUserLimit").startswith("a limit of the site")
    assert reason_words("SomethingNew") == "SomethingNew"
