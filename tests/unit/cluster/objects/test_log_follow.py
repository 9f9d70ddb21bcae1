"""What is read next by who follows a task's output: every line once, run after run, and no half lines."""

from __future__ import annotations

import random

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.objects.log_follow import (
    MAX_TEXT_BYTES,
    Heard,
    LogFollower,
    LogPosition,
    parse_positions,
    rest,
)
from fireflyer.cluster.schema.logs import LogPiece, LogText, StreamView, rank_log_of, stream_of_rank

Logs = dict[str, bytes]


def views(logs: Logs, *, closed: bool = False, gaps: tuple[tuple[int, int], ...] = ()) -> list[StreamView]:
    found = []
    for name, data in logs.items():
        attempt, rank = rank_log_of(name) or (None, None)
        found.append(
            StreamView(name=name, attempt=attempt, rank=rank, end=len(data), gaps=gaps, cut=False, closed=closed)
        )
    return found


def read(follower: LogFollower, logs: Logs, *, closed: bool = False) -> list[tuple[LogText, LogPosition]]:
    """All that there is to read now."""
    told = []
    streams = views(logs, closed=closed)
    while (wanted := follower.next(streams)) is not None:
        data = logs[wanted.stream]
        piece = data[wanted.offset : wanted.offset + MAX_TEXT_BYTES]
        end = wanted.offset + len(piece)
        last = closed and end == len(data)
        stream = next(one for one in streams if one.name == wanted.stream)
        page = LogPiece(offset=wanted.offset, data=piece, next_offset=end, cut=False, closed=last)
        if (found := follower.taken(stream, page)) is not None:
            told.append(found)
    return told


def texts(told: list[tuple[LogText, LogPosition]]) -> list[str]:
    return [f"{event.attempt}.{event.rank} {event.text}" for event, _ in told]


def test_names_of_logs_say_attempt_and_rank() -> None:
    assert rank_log_of(stream_of_rank(2, 17)) == (2, 17)
    for name in ("launcher", "events", "node-0", "attempt-1-rank-3-check", "attempt-01-rank-3", "attempt-1-rank-"):
        assert rank_log_of(name) is None


def test_half_a_line_waits_for_its_end_or_for_the_end_of_the_log() -> None:
    follower = LogFollower()
    logs = {"attempt-0-rank-0": b"one\ntw"}
    assert texts(read(follower, logs)) == ["0.0 one\n"]
    assert read(follower, logs) == []
    logs["attempt-0-rank-0"] += b"o\nthr"
    assert texts(read(follower, logs)) == ["0.0 two\n"]
    assert texts(read(follower, logs, closed=True)) == ["0.0 thr"]
    assert read(follower, logs, closed=True) == []


def test_a_progress_bar_is_told_as_it_moves_and_crlf_is_not_torn() -> None:
    follower = LogFollower()
    logs = {"attempt-0-rank-0": b"\r 10%\r"}
    assert texts(read(follower, logs)) == ["0.0 \r"]
    logs["attempt-0-rank-0"] += b"\n 20%"
    assert texts(read(follower, logs)) == ["0.0  10%\r\n"]


def test_a_line_longer_than_an_event_is_told_in_pieces_of_whole_characters() -> None:
    logs = {"attempt-0-rank-0": b"x" + "ä".encode() * MAX_TEXT_BYTES}
    told = read(LogFollower(follow=False), logs)
    assert "".join(event.text for event, _ in told) == logs["attempt-0-rank-0"].decode()
    assert len(told) > 1


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert texts(read(LogFollower(), {"attempt-0-rank-0": b"\xff\x00\n"})) == ["0.0 �\x00\n"]


def test_ranks_take_turns_and_a_rank_can_be_chosen() -> None:
    long = (b"y" * 99 + b"\n") * 1000
    logs = {stream_of_rank(0, rank): long for rank in range(3)}
    ranks = [event.rank for event, _ in read(LogFollower(), logs)]
    assert ranks[:6] == [0, 1, 2, 0, 1, 2]
    assert {event.rank for event, _ in read(LogFollower(rank=1), logs)} == {1}


def test_an_earlier_attempt_is_told_first_and_its_late_lines_too() -> None:
    follower = LogFollower()
    logs = {stream_of_rank(1, 0): b"again\n", stream_of_rank(0, 0): b"first\n", "launcher": b"x\n", "events": b"{}\n"}
    assert texts(read(follower, logs)) == ["0.0 first\n", "1.0 again\n"]
    logs[stream_of_rank(0, 0)] += b"late\n"
    assert texts(read(follower, logs)) == ["0.0 late\n"]


def test_lost_bytes_are_said() -> None:
    follower = LogFollower()
    streams = views({"attempt-0-rank-0": b"x" * 30}, gaps=((4, 20),))
    piece = LogPiece(offset=0, data=b"half", next_offset=4, cut=False, closed=False)
    found = follower.taken(streams[0], piece)
    assert found is not None
    assert found[0].text == "half", "no end of this line will come"
    wanted = follower.next(streams)
    assert wanted is not None
    assert wanted.offset == 4
    piece = LogPiece(offset=20, data=b"more\n12345", next_offset=30, cut=False, closed=False)
    found = follower.taken(streams[0], piece)
    assert found is not None
    assert (found[0].lost_bytes, found[0].offset, found[0].text) == (16, 20, "more\n")


def test_who_was_cut_off_goes_on_where_they_were_and_hears_every_line_once() -> None:
    for seed in range(30):
        random_ = random.Random(seed)
        logs: Logs = {}
        heard, told = Heard(), ""
        attempt = 0
        for step in range(40):
            if random_.random() < 0.1:
                attempt += 1
            for rank in range(2):
                of = max(0, attempt - (random_.random() < 0.3))  # the last lines of the one before may come late
                name = stream_of_rank(of, rank)
                logs[name] = logs.get(name, b"") + b"%d.%d.%d\n" % (of, rank, step)
            follower = LogFollower(after=parse_positions(heard.text))
            for event, position in read(follower, logs)[: random_.randrange(1, 5)]:
                told += event.text
                heard.add(str(position))
        for event, _ in read(LogFollower(after=parse_positions(heard.text)), logs, closed=True):
            told += event.text
        lines = told.split()
        assert sorted(lines) == sorted(b"".join(logs.values()).decode().split())


def test_positions_of_an_earlier_run_are_forgotten() -> None:
    heard = Heard()
    for text in ("0.0.0.5", "0.0.1.5", "0.1.0.5", "0.2.0.5", "0.2.1.7", "1.0.0.3"):
        heard.add(text)
    assert heard.text == "1.0.0.3"
    follower = LogFollower(after=parse_positions(heard.text))
    assert follower.run == 1
    assert texts(read(follower, {"attempt-0-rank-0": b"abcde\nf\n"})) == ["0.0 de\nf\n"]
    follower.go_on()
    assert texts(read(follower, {"attempt-0-rank-0": b"new\n"})) == ["0.0 new\n"]


@pytest.mark.parametrize(
    "text", ["1.2.3", "1.2.3.4.5", "a.b.c.d", "-1.0.0.0", "1.2.3.", "0.0.0." + "9" * 17, ",", "١.0.0.0"]
)
def test_positions_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"RUN\.ATTEMPT\.RANK\.OFFSET"):
        parse_positions(text)


def test_too_many_positions_are_refused() -> None:
    with pytest.raises(UsageError, match="at most"):
        LogFollower(after=parse_positions(",".join(["0.0.0.0"] * 9000)))


def test_what_follows_when_all_of_a_run_was_read() -> None:
    """By name: whether its logs get no longer, whether the task had later runs, whether it has finished."""
    running = {"follow": True, "only": False, "complete": False, "more_runs": False, "finished": False}
    order = [
        (running, "wait"),
        ({**running, "finished": True}, "wait"),  # its last lines are under way
        ({**running, "more_runs": True}, "wait"),
        ({**running, "complete": True}, "wait"),  # it is suspended, and waits for its next run
        ({**running, "complete": True, "more_runs": True}, "next"),
        ({**running, "complete": True, "finished": True}, "end"),
        ({**running, "complete": True, "only": True}, "end"),
        ({**running, "follow": False}, "end"),
        ({**running, "follow": False, "more_runs": True}, "next"),
        ({**running, "follow": False, "more_runs": True, "only": True}, "end"),
    ]
    assert [rest(**facts) for facts, _ in order] == [what for _, what in order]
