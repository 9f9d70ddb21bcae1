"""Copies of users' directories on a node, without a manager: what is made, given up, found again and removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.platform.running import wait_for

from fireflyer.base.errors import Aborted, Busy
from fireflyer.cluster.agent.run_copies import RunCopies
from fireflyer.cluster.agent.run_environments import RunEnvironments
from fireflyer.identity import UserCredential

TOKEN: Final = "0123456789abcdef"
SNAPSHOT: Final = "a" * 64


def no_manager() -> tuple[UserCredential, list[str]]:
    return UserCredential("fft1.0123456789abcdef.secret"), []


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[RunCopies]:
    environments = RunEnvironments(str(tmp_path / "environments"))
    made = RunCopies(str(tmp_path / "copies"), str(tmp_path / "cache"), no_manager, environments)
    yield made
    made.close()


def test_who_asks_while_it_is_made_is_to_ask_again_and_a_stop_gives_it_up(copies: RunCopies, tmp_path: Path) -> None:
    with pytest.raises(Busy):
        copies.find(TOKEN)
    copies.begin(TOKEN, SNAPSHOT, None)
    copies.begin(TOKEN, SNAPSHOT, None)
    with pytest.raises(Busy):
        copies.find(TOKEN)
    copies.stop(TOKEN)
    for ask in (copies.wait, copies.find):
        with pytest.raises(Aborted, match="was stopped"):
            ask(TOKEN)
    assert list((tmp_path / "copies").iterdir()) == [], "nothing is left of it"


def test_a_copy_of_an_earlier_agent_is_used_and_removed_with_what_is_read_only(
    copies: RunCopies, tmp_path: Path
) -> None:
    left = tmp_path / "copies" / TOKEN
    (left / "data" / "deep").mkdir(parents=True)
    (left / "data" / "deep" / "file").write_text("x")
    for path in (left / "data" / "deep" / "file", left / "data" / "deep", left / "data"):
        path.chmod(0o500)
    copies.adopt("f" * 16)
    copies.begin(TOKEN, SNAPSHOT, None)
    assert copies.find(TOKEN) == copies.wait(TOKEN) == str(left)
    assert list(copies.tokens) == [TOKEN]
    copies.remove(TOKEN)
    wait_for(lambda: not left.exists(), "it is removed")
    assert list(copies.tokens) == []
