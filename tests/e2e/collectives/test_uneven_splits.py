"""Parts on whose size sender and receiver do not agree: all ranks are told both sizes at once, no byte lies outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.patience import allowed_s
from tests.support.ranks.processes import ranks_running

from fireflyer.base.units import SECOND

pytestmark = pytest.mark.processes

TIMEOUT_NS = 60 * SECOND
AT_ONCE_S = 2.0
"""Nobody waits for the timeout; and the slack of a busy test machine."""
LAYOUTS = {"1x3": [0, 0, 0], "2+1": [0, 0, 1]}
SMALL, LARGE = 100, 300_000
SIZES = {  # what is sent, and what is expected, in hundredths of the usual
    "more is sent": (150, 100),
    "less is sent": (50, 100),
    "nothing is sent": (0, 100),
    "nothing is expected": (100, 0),
    "one more is sent": (101, 100),
}
TURNS = rotating(expected_s=2)
FAST = {("1x3", "more is sent", LARGE), ("2+1", "nothing is sent", SMALL)}


def cases() -> list[Any]:
    return [
        pytest.param(layout, how, usual, memory, id=f"{layout}-{how}-{usual}-{memory}", marks=() if fast else TURNS)
        for layout in LAYOUTS
        for number, how in enumerate(SIZES)
        for usual in (SMALL, LARGE)
        for memory in [("private", "arena", "copied")[(number + (usual == LARGE)) % 3]]
        for fast in [(layout, how, usual) in FAST]
    ]


@pytest.mark.parametrize(("layout", "how", "usual", "memory"), cases())
def test_splits_that_do_not_match_are_told_to_all_ranks(
    layout: str, how: str, usual: int, memory: str, tmp_path: Path
) -> None:
    sent, expected = (usual * share // 100 for share in SIZES[how])
    params: dict[str, Any] = {"usual": usual, "sender": 1, "receiver": 2, "sent": sent, "expected": expected}
    with ranks_running(
        tmp_path,
        LAYOUTS[layout],
        "",
        timeout_ns=TIMEOUT_NS,
        module="tests.support.ranks.uneven_ranks",
        arena=memory == "arena",
        peer_memory=memory != "copied",
        **params,
    ) as ranks:
        since = ranks.wait_for("wrong", [1, 2])
        for event in ranks.wait_for("failed", limit_s=AT_ONCE_S + 20).values():
            assert event["type"] == "UsageError", event
            assert f"rank 1 sends {4 * sent} bytes to rank 2 in all_to_all #4" in event["message"], event
            assert f"rank 2 expects {4 * expected} from it" in event["message"], event
            assert event["at"] - max(each["at"] for each in since.values()) < allowed_s(AT_ONCE_S), event
        for process in ranks.processes:
            process.stdin.close()
        assert ranks.exit_codes() == [0] * len(LAYOUTS[layout])
        assert not any(event["overrun"] for event in ranks.wait_for("done").values())
