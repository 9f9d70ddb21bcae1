"""`ff health slurm` on a node where something is missing: Slurm, a place to keep its state, time. No job is harmed, a
faulty node is drained, and what happened once is not forgotten."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.support.health import only_program
from tests.support.patience import allowed_s

from fireflyer.base.health_event import HealthEvent
from fireflyer.cli import main
from fireflyer.cli.health import slurm_node
from fireflyer.cli.health.slurm_log import SlurmLog
from fireflyer.cluster.core.slurm.drains import drain_reason
from fireflyer.cluster.core.slurm.node_record import DrainRecord, PendingEvent

Capture = pytest.CaptureFixture[str]
XID = HealthEvent(check="gpu_xid", severity="high", cause="xid_79", words="Xid 79", seen_ns=1, at_once=True, once=True)
MADE = msgspec.structs.replace(XID, user_made=True)
RAID = HealthEvent(check="site_raid", severity="high", words="disk 3 failed", seen_ns=1)
FAKE: Final = """\
#!/bin/sh
cd {directory}/slurm
echo "$(/usr/bin/basename $0) $*" >> calls
case "$(/usr/bin/basename $0) $*" in
*hang*) ;;
"scontrol --oneliner show node nope") echo "Node nope not found"; exit 1 ;;
"scontrol --oneliner show node"*) echo "NodeName=me Arch=x State=$(/bin/cat shown) Boards=1" ;;
"scontrol update"*State=DRAIN*) [ ! -e away ] || echo > hangs
    echo drained > state; echo IDLE+DRAIN > shown; echo "${{*##*Reason=}}" > reason ;;
"scontrol update"*State=UNDRAIN*) echo idle > state; echo IDLE > shown; echo none > reason ;;
sinfo*%C*) echo "me|test|$(/bin/cat state)|$(/bin/cat used)/0/0/4"; /bin/cat others ;;
sinfo*) [ ! -e edited ] || [ $(/bin/grep -c %E calls) -lt 2 ] || echo "bob has it" > reason
    echo "me|1795811459|$(/bin/cat reason)"; /bin/cat reasons ;;
squeue*) /bin/cat jobs ;;
esac
[ ! -e hangs ] || exec /bin/sleep 60
"""
"""Slurm's commands as a script: nodes, jobs and reasons are files."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its directory; the check finds a fault while `broken` is there, and no command of Slurm is found."""
    (tmp_path / "check.sh").write_text(f'if [ -e {tmp_path}/broken ]; then echo "disk 3 failed"; exit 2; fi; echo ok\n')
    (tmp_path / "policy.toml").write_text(only_program("site_raid", tmp_path / "check.sh"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "me")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(slurm_node, "_SETTLE_S", 0.0)
    return tmp_path


class Slurm:
    """What its commands are told, and say."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "slurm"
        self.directory.mkdir()
        self.set(state="idle", shown="IDLE", reason="none", used="0", jobs="", others="", reasons="")
        for name in ("scontrol", "sinfo", "squeue"):
            (directory / name).write_text(FAKE.format(directory=directory))
            (directory / name).chmod(0o755)

    def set(self, **files: str) -> None:
        for name, text in files.items():
            (self.directory / name).write_text(f"{text}\n" if text else "")

    def calls(self) -> list[str]:
        """Since the last time."""
        path = self.directory / "calls"
        said = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [re.sub(r"(--format|--Format)=", "", one) for one in said]

    def told(self) -> list[str]:
        return [one for one in self.calls() if one.startswith("scontrol update")]

    @property
    def reason(self) -> str:
        return (self.directory / "reason").read_text().strip()


@pytest.fixture
def cluster(node: Path) -> Slurm:
    return Slurm(node)


def remembers(node: Path, *events: HealthEvent, **fields: object) -> None:
    kept = node / "state" / "slurm"
    kept.mkdir(parents=True, mode=0o700, exist_ok=True)
    pending = tuple(PendingEvent(event, "", time.time_ns() // 10**9) for event in events)
    (kept / "slurm.json").write_bytes(msgspec.json.encode(DrainRecord(pending=pending, **fields)))  # type: ignore[arg-type]


def kept(node: Path) -> DrainRecord:
    return msgspec.json.decode((node / "state" / "slurm" / "slurm.json").read_bytes(), type=DrainRecord)


def certain_fault(node: Path, program: str) -> None:
    """A mount that is missing, which counts at once here, beside a program."""
    (node / "check.sh").write_text(program)
    policy = only_program("site_raid", node / "check.sh").replace(
        "[mounts]\nenabled = false\n", "[mounts]\nat_once = true\n"
    )
    (node / "policy.toml").write_text(f'{policy}[inventory]\nmounts = ["{node}/none"]\n')


def slurm(node: Path, step: str, *options: str) -> int:
    given = ["--policy", str(node / "policy.toml"), "--state", str(node / "state"), "--probes", "1"]
    return main(["health", "slurm", step, *given, *options])


def test_a_node_without_a_fault_starts_its_jobs_without_asking_slurm(node: Path, capsys: Capture) -> None:
    assert slurm(node, "prolog") == slurm(node, "epilog") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("step", ["prolog", "epilog"])
def test_a_job_starts_where_slurm_cannot_be_asked_or_the_policy_is_wrong(
    node: Path, capsys: Capture, step: str
) -> None:
    (node / "broken").touch()
    assert slurm(node, step) == 0
    assert f"ff health slurm {step}: there is no sinfo here" in capsys.readouterr().err
    (node / "policy.toml").write_text("nonsense = 1\n")
    assert slurm(node, step) == 0
    assert "nonsense" in capsys.readouterr().err


def test_the_program_of_slurm_says_why_it_did_nothing(node: Path, capsys: Capture) -> None:
    assert slurm(node, "check") == 1
    assert "there is no scontrol here" in capsys.readouterr().err


def test_what_happened_once_is_kept_until_slurm_can_be_told(node: Path, capsys: Capture) -> None:
    remembers(node, XID)
    for _ in range(2):
        assert slurm(node, "epilog") == 0
        assert "there is no sinfo" in capsys.readouterr().err, "it is not at peace"
        assert [one.event for one in kept(node).pending] == [XID]
    (node / "state" / "slurm" / "slurm.json").write_bytes(b'{"at_s": "yesterday"}')
    assert slurm(node, "epilog") == 0
    assert "what was remembered is not used" in capsys.readouterr().err


def test_what_happened_is_acted_on_once_slurm_is_there(node: Path, cluster: Slurm) -> None:
    remembers(node, XID)
    assert slurm(node, "check") == 0
    assert cluster.reason.startswith(
        "ff: gpu_xid: Xid 79 (0 min ago, before the node was started again); validate it ("
    )
    assert (kept(node).pending, kept(node).failed) == ((), ("gpu_xid",))


# --- in time ---


def test_a_certain_fault_drains_the_node_before_anything_is_repeated(node: Path, cluster: Slurm) -> None:
    certain_fault(node, f"echo run >> {node}/slurm/calls; echo bad; exit 2\n")
    assert slurm(node, "check", "--probes", "2", "--spacing", "1s") == 0
    said = [one for one in cluster.calls() if one == "run" or one.startswith("scontrol update")]
    assert [one.split()[0] for one in said] == ["run", "scontrol", "run"]
    assert f"Reason=ff: mounts mount:{node}/none: " in said[1]


def test_a_slurm_that_hangs_is_given_up_in_time_and_nothing_is_lost(
    node: Path, cluster: Slurm, capsys: Capture
) -> None:
    remembers(node, XID)
    cluster.set(hangs="x")
    began_s = time.monotonic()
    assert slurm(node, "check", "--limit", "1s") == 1
    assert time.monotonic() - began_s < allowed_s(8)
    assert "gave up after 1 s, before Slurm ends it; the next round does what is left" in capsys.readouterr().err
    assert [one.event for one in kept(node).pending] == [XID]


def test_a_drain_that_was_not_looked_at_again_is_judged_by_the_next_round(
    node: Path, cluster: Slurm, capsys: Capture
) -> None:
    """A check that lies on all nodes, and a Slurm that is slow, must not drain a cluster."""
    (node / "broken").touch()
    cluster.set(away="x", others="you|test|idle|0/4/0/4")
    assert slurm(node, "check", "--limit", f"{allowed_s(2):.0f}s") == 1
    assert kept(node).unsettled == cluster.reason == drain_reason("me", RAID)
    (cluster.directory / "away").unlink()
    (cluster.directory / "hangs").unlink()
    cluster.set(others="you|test|drained|0/0/4/4", reasons=f"you|1795811000|{drain_reason('you', RAID)}")
    cluster.calls()
    assert slurm(node, "check") == 0
    assert cluster.told() == ["scontrol update NodeName=me State=UNDRAIN"]
    assert (kept(node).unsettled, kept(node).at_s) == ("", ())


def test_what_there_is_no_time_to_repeat_is_said(node: Path, cluster: Slurm, capsys: Capture) -> None:
    (node / "broken").touch()
    assert slurm(node, "check", "--probes", "2", "--spacing", "40s") == 0
    assert "no time to repeat site_raid: what they found counts in a later round" in capsys.readouterr().err
    for _ in range(2):
        assert cluster.told() == []
        assert slurm(node, "check", "--probes", "3", "--spacing", "40s") == 0
    assert cluster.reason == drain_reason("me", RAID), "three rounds of an hour have found it"


# --- repair ---


def shown(node: Path, capsys: Capture) -> str:
    capsys.readouterr()
    assert main(["health", "slurm", "show", "--state", str(node / "state")]) == 0
    return capsys.readouterr().out


def test_the_second_fault_of_a_part_waits_for_a_person_who_says_what_was_done(
    node: Path, cluster: Slurm, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for state in ("drained", "idle", "drained", "drained"):
        (node / "broken").touch() if cluster.reason == "none" else (node / "broken").unlink()
        assert slurm(node, "check", "--back-off", "1s") == 0
        assert (cluster.directory / "state").read_text().strip() == state
    assert "reboot is due, ticket 1: do it, then `ff health slurm repair reboot`" in capsys.readouterr().out
    assert "; reboot is due (" in cluster.reason
    monkeypatch.setenv("SUDO_USER", "ann")
    capsys.readouterr()
    assert main(["health", "slurm", "show", "--node", "other", "--state", str(node / "state")]) == 1
    assert "is of node me, not of other" in capsys.readouterr().err
    assert main(["health", "slurm", "repair", "reboot", "power cycled", "--state", str(node / "state")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^health +testing since .*: reboot was done: power cycled; it is tested$", out, re.MULTILINE)
    assert slurm(node, "check", "--back-off", "1s") == 0
    assert cluster.reason == "none"
    out = shown(node, capsys)
    assert re.search(r"^health +probation since", out, re.MULTILINE)
    assert re.search(r"^part +2 faults of it in 28 days$", out, re.MULTILINE)
    assert re.search(r"ann.* reboot +power cycled", out)


def test_a_node_that_has_forgotten_its_drain_opens_a_ticket_by_the_reason(
    node: Path, cluster: Slurm, capsys: Capture
) -> None:
    cluster.set(state="drained", shown="IDLE+DRAIN", reason=drain_reason("me", RAID), used="2")
    assert slurm(node, "check") == 0
    ticket = kept(node).repair.tickets[0]
    assert (ticket.fault.check, ticket.fault.words) == ("site_raid", drain_reason("me", RAID))


def test_a_repair_is_refused_where_nothing_was_drained_and_words_are_checked(
    node: Path, cluster: Slurm, capsys: Capture
) -> None:
    where = ("--state", str(node / "state"))
    assert main(["health", "slurm", "show", *where]) == 1
    assert f"nothing is remembered in {node / 'state'}; give the --state" in capsys.readouterr().err
    assert not (node / "state").exists()
    assert slurm(node, "check") == 0
    assert shown(node, capsys) == "node     me\nhealth   healthy\n"
    assert main(["health", "slurm", "repair", "reboot", *where]) != 0
    assert "node me is healthy: ff has not drained it for a fault" in capsys.readouterr().err
    for words in (("repair",), ("repair", "hammer"), ("repair", "rma", "x" * 401), ("check", "rma"), ("show", "it")):
        assert main(["health", "slurm", *words, *where]) != 0
        assert capsys.readouterr().err.startswith("error: ")


def test_what_a_person_drained_has_no_ticket(node: Path, cluster: Slurm) -> None:
    cluster.set(state="drained", shown="IDLE+DRAIN", reason="bob looks at it")
    (node / "broken").touch()
    assert slurm(node, "check") == 0
    assert cluster.reason == "bob looks at it"
    assert kept(node).repair.tickets == ()


# --- without a place for its state ---


def test_a_node_drains_where_nothing_can_be_kept(node: Path, cluster: Slurm, capsys: Capture) -> None:
    (node / "broken").touch()
    (node / "state").write_text("no directory")
    assert slurm(node, "check") == 0
    assert cluster.reason == drain_reason("me", RAID)
    assert "nothing is remembered from one round to the next" in capsys.readouterr().err


def test_what_could_not_be_kept_does_not_count_as_told(node: Path, cluster: Slurm, capsys: Capture) -> None:
    (node / "broken").touch()
    (node / "state" / "slurm" / "slurm.json.new" / "x").mkdir(parents=True)
    (node / "state" / "slurm").chmod(0o700)
    assert slurm(node, "check") == 0
    assert cluster.reason == drain_reason("me", RAID)
    assert capsys.readouterr().err.count("this round is not remembered: ") == 1
    assert not (node / "state" / "slurm" / "counters.json").exists()


def test_a_round_that_hangs_keeps_no_other_from_draining(node: Path, cluster: Slurm, capsys: Capture) -> None:
    remembers(node)
    (node / "broken").touch()
    fd = os.open(node / "state" / "slurm", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert slurm(node, "check", "--limit", "5s") == 0
    os.close(fd)
    assert cluster.reason == drain_reason("me", RAID)
    assert "for 1 s: this one is not remembered" in capsys.readouterr().err
    assert kept(node) == DrainRecord()


def test_rounds_of_slurm_share_nothing_with_others_of_the_same_state(node: Path, cluster: Slurm) -> None:
    assert main(["health", "--policy", str(node / "policy.toml"), "--state", str(node / "state")]) == 0
    assert slurm(node, "check") == 0
    assert sorted(path.name for path in (node / "state").iterdir()) == ["counters.json", "slurm"]
    assert [path.name for path in (node / "state" / "slurm").iterdir()] == ["counters.json"]


# --- what Slurm is asked ---


def test_a_node_that_is_well_asks_slurm_once_and_of_itself_alone(node: Path, cluster: Slurm) -> None:
    assert slurm(node, "check") == 0
    assert cluster.calls() == ["scontrol --oneliner show node me"]


def test_a_node_serves_again_unless_its_drain_was_changed_meanwhile(
    node: Path, cluster: Slurm, capsys: Capture
) -> None:
    cluster.set(state="drained", shown="IDLE+DRAIN", reason=drain_reason("me", RAID), edited="x")
    assert slurm(node, "check") == 0
    assert "its drain was changed meanwhile: it is left as it is" in capsys.readouterr().out
    assert (cluster.told(), cluster.reason) == ([], "bob has it")
    (cluster.directory / "edited").unlink()
    cluster.set(reason=drain_reason("me", RAID))
    assert slurm(node, "resume") == 0
    assert cluster.told() == ["scontrol update NodeName=me State=UNDRAIN"]
    assert slurm(node, "resume") == 2
    assert "is not drained by ff" in capsys.readouterr().err


def test_a_node_that_slurm_does_not_know_is_named(node: Path, cluster: Slurm, capsys: Capture) -> None:
    assert slurm(node, "check", "--node", "nope") == 2
    assert "Slurm knows no node nope; give its name with --node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "jobs", "drains"),
    [
        ("prolog", ["77"], True),
        ("epilog", ["77"], True),
        ("prolog", ["77", "78"], False),
        ("check", ["77"], False),
    ],
)
def test_the_job_of_a_prolog_does_not_make_its_node_busy(
    node: Path, cluster: Slurm, monkeypatch: pytest.MonkeyPatch, step: str, jobs: list[str], drains: bool
) -> None:
    remembers(node, MADE)
    cluster.set(state="allocated", used="4", jobs="\n".join(f"{job}  0  1 " for job in jobs))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert slurm(node, step) == (4 if drains and step == "prolog" else 0)
    assert bool(cluster.told()) == drains
    assert [one.event for one in kept(node).pending] == ([] if drains else [MADE])


def test_figures_say_how_the_node_was_left(node: Path, cluster: Slurm) -> None:
    file = node / "ff.prom"

    def left() -> tuple[str, bool]:
        """And whether a fault is in the same file."""
        text = file.read_text()
        state = re.findall(r'slurm_node\{state="(\w+)"\} 1', text)[0]
        return state, 'findings{check="site_raid",severity="high"} 1' in text

    assert slurm(node, "prolog", "--prometheus", str(file)) == 0
    assert not file.exists(), "Slurm was not asked"
    assert slurm(node, "check", "--prometheus", str(file)) == 0
    assert left() == ("serves", False)
    (node / "broken").touch()
    cluster.set(hangs="x")
    assert slurm(node, "check", "--limit", f"{allowed_s(2):.0f}s", "--prometheus", str(file)) == 1
    assert left() == ("unknown", True)
    (cluster.directory / "hangs").unlink()
    assert slurm(node, "check", "--prometheus", str(file)) == 0
    assert left() == ("drained", True)
    assert slurm(node, "check", "--prometheus", str(node / "none" / "x")) == 0, "a job of another program"


def test_the_log_of_the_system_has_what_was_done(tmp_path: Path, capsys: Capture) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(tmp_path / "log"))
        log.settimeout(allowed_s(10))
        SlurmLog(str(tmp_path / "log")).say("drained\nby ff")
        assert re.fullmatch(rb"<29>\w{3} [ \d]\d [\d:]{8} ff-health-slurm\[\d+\]: drained by ff", log.recv(999))
        SlurmLog(str(tmp_path / "log")).fail("away")
        assert log.recv(999).startswith(b"<27>")
    SlurmLog(str(tmp_path / "none")).say("nobody listens")
    assert capsys.readouterr().out.endswith("nobody listens\n")


def test_options_stand_behind_the_command_that_takes_them(capsys: Capture) -> None:
    assert main(["health", "--check", "mounts", "slurm", "check"]) == 2
    assert "give the options of 'slurm' behind it" in capsys.readouterr().err
