"""The file of a running `ff up`, written again: what is applied, what is said, and what stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from fireflyer.base.errors import Unreachable
from fireflyer.cli.detached import command_line
from fireflyer.cli.platform.up import read_up_file
from fireflyer.cluster.local.config import HealthWish, NodesConfig, StorageWish, UpConfig
from fireflyer.cluster.local.up_file import UpFile, changes

AGAIN = "ff down && ff up up.toml"


class Followed:
    """A file, and what became of it."""

    def __init__(self, path: Path, text: str, *, meanwhile: str | None = None) -> None:
        """`meanwhile`: written after the start has read the file."""
        path.write_text(text)
        running = read_up_file(str(path))
        if meanwhile is not None:
            path.write_text(meanwhile)
        self.path = path
        self.said: list[str] = []
        self.applied: list[HealthWish] = []
        self.fails = ""
        self._file = UpFile(str(path), read_up_file, running, say=self.said.append, again=AGAIN)

    def look(self, times: int = 2) -> list[str]:
        """What is said meanwhile."""
        self.said.clear()
        for _ in range(times):
            self._file.look(self._apply)
        return list(self.said)

    def write(self, text: str) -> list[str]:
        self.path.write_text(text)
        return self.look()

    def _apply(self, health: HealthWish) -> None:
        if self.fails:
            raise Unreachable(self.fails)
        self.applied.append(health)


def test_what_differs_is_named_as_the_file_writes_it() -> None:
    running, health = UpConfig(), HealthWish(enabled=True)
    assert changes(running, running) == (None, ())
    assert changes(running, UpConfig(health=health)) == (health, ())
    other = UpConfig(agents=2, nodes=(NodesConfig(names=("agent-1",)),), storage=StorageWish(nodes=0), health=health)
    assert changes(running, other) == (health, ("agents", "[[nodes]]", "[storage]"))


def test_a_change_of_health_is_applied_once(tmp_path: Path) -> None:
    file = Followed(tmp_path / "up.toml", "agents = 1\n")
    assert file.look() == []
    assert file.write("agents = 1\n[health]\nenabled = true\n") == [f"[health] of {file.path} is applied"]
    assert file.look() == []
    assert file.write("# the same\nagents = 1\n[health]\nenabled = true\n") == []
    assert file.applied == [HealthWish(enabled=True)]
    file.path.unlink()
    (line,) = file.look()
    assert "[health] stays as it was" in line
    file.write("agents = 1\n")
    assert file.applied == [HealthWish(enabled=True), HealthWish()]


def test_what_changes_while_the_platform_starts_is_found_by_the_first_looks(tmp_path: Path) -> None:
    file = Followed(tmp_path / "up.toml", "", meanwhile="[health]\nenabled = true\n")
    file.look()
    assert file.applied == [HealthWish(enabled=True)]


def test_other_sections_are_named_once_and_are_not_applied(tmp_path: Path) -> None:
    file = Followed(tmp_path / "up.toml", "agents = 1\n")
    line = f"agents, [time_sharing] of {file.path} changed; that counts after: {AGAIN}"
    text = 'agents = 2\n[time_sharing]\nguarantee = "1h"\n'
    assert file.write(text) == [line]
    assert file.write(f"{text}[health]\nenabled = true\n") == [f"[health] of {file.path} is applied"]
    assert file.write(f"{text}usage_margin = 2.0\n[health]\nenabled = true\n") == [line]
    assert file.write("agents = 1\n[health]\nenabled = true\n") == []
    assert file.applied == [HealthWish(enabled=True)]


@pytest.mark.parametrize("text", ["[health\n", '[health]\nenabled = "no"\n', '[health]\npolicy = "nowhere"\n'])
def test_a_wrong_file_is_one_line_and_what_was_stays(tmp_path: Path, text: str) -> None:
    file = Followed(tmp_path / "up.toml", "[health]\nenabled = true\n")
    (line,) = file.write(text)
    assert line.startswith("the file is not used, [health] stays as it was: ")
    assert "\n" not in line
    assert file.look() == []
    assert file.write("[health]\nenabled = true\n") == []
    assert file.applied == []


def test_a_file_that_an_editor_has_emptied_and_not_yet_written_ends_no_checks(tmp_path: Path) -> None:
    text = '[health]\nenabled = true\nperiod = "1m"\n'
    file = Followed(tmp_path / "up.toml", text)
    file.look()
    file.path.write_text("")
    assert file.look(times=1) == []
    assert file.write(text.replace("1m", "20m")) == [f"[health] of {file.path} is applied"]
    assert file.applied == [HealthWish(enabled=True, period="20m")]


def test_what_could_not_be_applied_is_tried_again_and_said_once(tmp_path: Path) -> None:
    file = Followed(tmp_path / "up.toml", "")
    file.fails = "no space"
    (line,) = file.write("[health]\nenabled = true\n")
    assert "cannot be applied yet: no space" in line
    assert file.look(times=3) == []
    file.fails = ""
    assert file.look(times=1) == [f"[health] of {file.path} is applied"]
    assert file.applied == [HealthWish(enabled=True)]


def test_the_command_that_is_to_be_given_again_is_the_one_that_was_given() -> None:
    assert command_line(["up", "--nodes", "2", "a b.toml"]) == "ff up --nodes 2 'a b.toml'"
    assert command_line(["up", "a.toml", "--report-fd", "9"]) == "ff up a.toml --detach"
