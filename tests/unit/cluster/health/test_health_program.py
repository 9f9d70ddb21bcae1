"""Programs that hang, flood, fail or leave children behind are bounded, and what they did is said."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.agent import health, health_program
from fireflyer.cluster.agent.health import NodeChecks
from fireflyer.cluster.agent.health_program import MAX_LINES, MAX_OUTPUT_BYTES, Printed, refused, run_health_program
from fireflyer.cluster.schema.sync import HealthOrder


def run(script: str, limit_ns: int = 60 * SECOND) -> Printed:
    return asyncio.run(run_health_program(("/bin/sh", "-c", script), limit_ns))


def test_lines_and_the_exit_code_are_what_the_program_printed() -> None:
    assert run("echo one; echo; echo two; exit 2") == Printed((b"one", b"two"), 2)


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    printed = run(f"sleep 600 & echo $! > {tmp_path}/child; echo begun; wait", 300 * MS)
    assert printed.lines == ()
    assert "did not end within" in printed.failure
    child = int((tmp_path / "child").read_text())
    until_s = time.monotonic() + allowed_s(10)
    while lives(child):
        assert time.monotonic() < until_s, "the child of the program lives on"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done",
            str(MAX_OUTPUT_BYTES),
        ),
        (f"i=0; while [ $i -le {MAX_LINES} ]; do echo $i; i=$((i+1)); done", f"{MAX_LINES} of"),
        ("head -c 5000 /dev/zero | tr '\\0' a", "bytes are allowed"),
    ],
)
def test_a_program_that_prints_too_much_came_to_no_result(script: str, words: str) -> None:
    printed = run(script)
    assert printed.lines == ()
    assert words in printed.failure


def test_a_program_that_is_not_there_came_to_no_result() -> None:
    printed = asyncio.run(run_health_program(("/nowhere/health",), SECOND))
    assert (printed.lines, printed.exit_code) == ((), 127)


def test_a_program_that_is_not_there_says_so_in_its_report() -> None:
    async def report() -> str:
        done = asyncio.Event()
        checks = NodeChecks(1, done.set)
        checks.hear(HealthOrder(program=("/nowhere/health",)))
        task = asyncio.create_task(checks.run())
        async with asyncio.timeout(allowed_s(20)):
            await done.wait()
        task.cancel()
        await asyncio.wait([task])
        return checks.reports()[0].failure

    assert "/nowhere/health" in asyncio.run(report())


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("fireflyer:health", False),  # an option that is not known
        ("fireflyer:node-check", False),
        ("/etc/fireflyer/health/none-there", False),
        ("/etc/fireflyer/health/../../../bin/sh", False),
        ("/etc/fireflyer/health/a/b", False),
        ("/bin/sh", False),
        ("sh", False),
    ],
)
def test_managers_have_an_agent_of_root_run_only_what_root_has_put_there(name: str, runs: bool) -> None:
    assert (refused((name, "-c", "id")) == "") == runs


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ((), True),
        (("--check", "mounts"), True),
        (("--check", "mounts", "--check", "gpu_xid"), True),
        (("--check",), False),
        (("--check", "--follow"), False),
        (("--check=mounts",), False),
        (("--follow",), False),
        (("--state", "/etc"), False),
        (("--policy", "gpu.toml"), False),
        (("--policy", "/home/eve/gpu.toml"), False),
        (("--policy=/home/eve/gpu.toml",), False),
        (("--check", "mounts", "--policy", "/home/eve/gpu.toml"), False),
    ],
)
def test_managers_give_ff_health_no_option_that_has_root_run_or_write_something(
    arguments: tuple[str, ...], runs: bool
) -> None:
    assert (refused(("fireflyer:health", *arguments)) == "") == runs


def test_managers_give_the_check_of_a_node_only_quantities() -> None:
    assert refused(("fireflyer:node-check", "--memory", "4GiB", "--memory-time", "1.5s")) == ""
    for arguments in (("--directory", "/etc"), ("--peer", "h:1"), ("--memory", "--sys"), ("--check", "mounts")):
        assert "is not run as root" in refused(("fireflyer:node-check", *arguments))


def test_a_policy_is_read_as_root_only_where_nobody_else_may_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, elsewhere = tmp_path / "health", tmp_path / "elsewhere"
    monkeypatch.setattr(health_program, "CHECKS_DIRECTORY", str(directory))
    for parent in (directory, elsewhere):
        parent.mkdir(mode=0o755)
        (parent / "gpu.toml").write_text("version = 1\n")
        (parent / "gpu.toml").chmod(0o644)
    (directory / "link.toml").symlink_to(elsewhere / "gpu.toml")

    def reads(path: str) -> bool:
        return not refused(("fireflyer:health", "--policy", path))

    assert reads(f"{directory}/gpu.toml")
    for path in ("link.toml", "../elsewhere/gpu.toml", "./gpu.toml", "none.toml", "gpu.toml/"):
        assert not reads(f"{directory}/{path}"), path
    (directory / "gpu.toml").chmod(0o664)
    assert not reads(f"{directory}/gpu.toml"), "a group may write it"
    (directory / "gpu.toml").chmod(0o644)
    directory.chmod(0o777)
    assert not reads(f"{directory}/gpu.toml"), "anyone may replace it"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files to others")
def test_a_program_of_the_site_is_run_as_root_only_where_nobody_else_can_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "health"
    monkeypatch.setattr(health_program, "CHECKS_DIRECTORY", str(directory))
    directory.mkdir(mode=0o755)
    program = directory / "gpus"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert refused((str(program), "-c", "id")) == ""
    program.chmod(0o775)
    assert "mode 0775" in refused((str(program),))
    program.chmod(0o755)
    os.chown(program, 12345, -1)
    assert "belongs to uid 12345" in refused((str(program),))


def test_its_children_do_not_keep_a_program_that_has_ended() -> None:
    assert run("sleep 600 & echo done", 60 * SECOND).lines == (b"done",)


def test_the_loop_goes_on_while_a_program_runs() -> None:
    async def turns() -> int:
        task = asyncio.create_task(run_health_program(("/bin/sh", "-c", "sleep 0.3"), 60 * SECOND))
        count = 0
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        return count

    assert asyncio.run(turns()) > 5


def test_a_test_of_the_node_carries_out_the_validation() -> None:
    async def lines(code: int) -> tuple[bytes, ...]:
        done = asyncio.Event()
        checks = NodeChecks(1, done.set)
        validation = ("/bin/sh", "-c", f"echo suspect: memory; exit {code}")
        checks.hear(HealthOrder(program=("/bin/true",), validation=validation, probe=1))
        task = asyncio.create_task(checks.run())
        async with asyncio.timeout(allowed_s(20)):
            await done.wait()
        task.cancel()
        await asyncio.wait([task])
        return checks.reports()[0].lines

    for code, severity in ((0, '"ok"'), (2, '"high"'), (1, '"warn"')):
        (line,) = asyncio.run(lines(code))
        assert f'"severity":{severity}' in line.decode()
        assert '"check":"validation"' in line.decode()


def test_a_program_that_prints_nothing_and_fails_came_to_no_result() -> None:
    assert "printed nothing, and ended with exit code 2" in run("echo no such policy >&2; exit 2").failure


def test_rounds_of_the_agent_keep_their_counters_apart_from_those_of_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    program = ("fireflyer:health", "--check", "mounts")
    printed = asyncio.run(run_health_program(program, 60 * SECOND, str(tmp_path / "agent" / "health")))
    assert [b'"check":"mounts"' in line for line in printed.lines] == [True]
    assert (tmp_path / "agent/health/counters.json").exists()
    assert not (tmp_path / "home").exists()


def told_by_agent(monkeypatch: pytest.MonkeyPatch, at_start: frozenset[str], meanwhile: frozenset[str]) -> object:
    """Whether the program was told that the node is idle, and what the agent reports of what it then printed."""
    asked: list[bool] = []

    async def program(_: tuple[str, ...], __: int, ___: str, *, idle: bool) -> Printed:
        asked.append(idle)
        checks.runs_are(meanwhile)
        severity = "warn" if idle else "ok"
        return Printed(tuple(b'{"check":"%s","severity":"%s","seen_ns":1}' % (check, severity.encode())
                             for check in (b"gpu_processes", b"mounts")), 0)  # fmt: skip

    monkeypatch.setattr(health, "run_health_program", program)

    done = asyncio.Event()
    checks = NodeChecks(1, done.set)
    checks.runs_are(at_start)

    async def one_round() -> None:
        checks.hear(HealthOrder(program=("fireflyer:health",), period_ns=3600 * SECOND))
        task = asyncio.create_task(checks.run())
        await asyncio.wait_for(done.wait(), allowed_s(30))
        task.cancel()

    asyncio.run(one_round())
    (report, *_) = checks.reports()
    return asked[0], [line.split(b'"')[3] for line in report.lines]


def test_the_checks_are_told_whether_the_node_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    none, run_7 = frozenset[str](), frozenset({"run-7"})
    assert told_by_agent(monkeypatch, none, none) == (True, [b"gpu_processes", b"mounts"])
    assert told_by_agent(monkeypatch, run_7, run_7) == (False, [b"gpu_processes", b"mounts"])
    assert told_by_agent(monkeypatch, none, run_7) == (True, [b"mounts"]), (
        "a run has come: the processes may be its own"
    )


def test_only_what_comes_with_fire_flyer_is_told_so() -> None:
    shipped = health_program._command(("fireflyer:health", "--check", "a"), "", follows=False, idle=True)
    assert shipped[-4:] == ("--json", "--idle", "--check", "a")
    assert "--idle" not in health_program._command(("fireflyer:health",), "", follows=True, idle=False)
    assert health_program._command(("/opt/health",), "", follows=False, idle=True) == ("/opt/health",)
