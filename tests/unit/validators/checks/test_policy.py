"""What the policy decides: severities, required checks, programs of the site; and the state between rounds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.base.health_event import MAX_LINE_BYTES, HealthEvent
from fireflyer.base.xids import TABLE_V, XIDS
from fireflyer.cli.health.policy_file import PolicyFile, read_policy
from fireflyer.validators.checks.state_file import MAX_STATE_BYTES, StateFile
from fireflyer.validators.core.checks.catalogue import CHECKS, chosen_checks
from fireflyer.validators.core.checks.evidence import CheckCounters, Counters, Evidence, Finding, KernelRecord, Output
from fireflyer.validators.core.checks.health_round import as_event, judge_round, nagios_exit_code
from fireflyer.validators.core.checks.nagios import parse_perfdata
from fireflyer.validators.core.checks.policy import HealthPolicy, settings_of
from fireflyer.validators.core.checks.settings import CheckSettings

NOW_NS: Final = 10**18
XID_79: Final = KernelRecord(5, NOW_NS, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")


def policy(tmp_path: Path, text: str) -> HealthPolicy:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return read_policy(str(path))


def events(rules: HealthPolicy, check: str, evidence: Evidence) -> list[HealthEvent]:
    return list(judge_round(chosen_checks(rules, [check]), evidence, rules).events)


def test_each_check_has_settings_in_the_policy() -> None:
    assert [
        check.name for check in CHECKS if not isinstance(settings_of(HealthPolicy(), check.name), CheckSettings)
    ] == []


def test_the_severity_of_a_cause_can_be_changed(tmp_path: Path) -> None:
    rules = policy(tmp_path, 'version = 1\n[gpu_xid]\nseverity = { xid_79 = "warn" }\n')
    (event,) = events(rules, "gpu_xid", Evidence(now_ns=NOW_NS, kernel=(XID_79,)))
    assert (event.severity, event.at_once) == ("warn", False)
    rules = policy(tmp_path, '[gpu_xid]\nseverity = { any = "low", xid_31 = "ok" }\n')
    (event,) = events(rules, "gpu_xid", Evidence(now_ns=NOW_NS, kernel=(XID_79,)))
    assert event.severity == "low"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[gpu_xid]\nsevere = true\n", "line 2.*unknown field `severe`"),
        ("[gpu_heat]\nenabled = true\n", "line 1.*unknown field `gpu_heat`"),
        ("[inventory]\ngpu = 8\n", "line 2.*unknown field `gpu`"),
        ('[disk_space]\nlow_used_share = "90%"\n', "line 2"),
        ("version = 2\n", "line 1"),
        ("disk_space = [", "policy.toml"),
        ('[[programs]]\nname = "raid"\nargv = ["check_raid"]\n', "not an absolute path"),
        ('[[programs]]\nname = "mounts"\nargv = ["/bin/true"]\n', "has that name already"),
    ],
)
def test_a_policy_that_is_wrong_is_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        policy(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_a_required_check_that_cannot_run_is_a_warning_and_a_fault_where_the_device_exists(tmp_path: Path) -> None:
    missing = Evidence(now_ns=NOW_NS, outputs={"nvidia_smi": Output(problem="nvidia-smi is not installed")})
    for text, severity, code in (
        ("", "ok", 0),
        ("[gpu_ecc]\nrequired = true\n", "warn", 3),
        ("[gpu_ecc]\nrequired = true\n[inventory]\ngpus = 8\n", "high", 2),
    ):
        rules = policy(tmp_path, text)
        (event,) = events(rules, "gpu_ecc", missing)
        assert (event.severity, event.could_not_run) == (severity, True)
        well = HealthEvent(check="mounts", severity="ok", seen_ns=1)
        assert nagios_exit_code([event, well]) == code


@pytest.mark.parametrize(
    ("check", "evidence"),
    [
        ("gpu_ecc", Evidence(now_ns=NOW_NS, outputs={"nvidia_smi": Output(problem="did not end", hung=True)})),
        (
            "disk_smart",
            Evidence(
                now_ns=NOW_NS,
                files={"sys/block/sda/size": "1"},
                outputs={"smartctl:sda": Output(problem="did not end", hung=True)},
            ),
        ),
        ("nvme", Evidence(now_ns=NOW_NS, late=frozenset({"nvme"}), incomplete={"sys/class/nvme/nvme*/state": "late"})),
        ("gpu_xid", Evidence(now_ns=NOW_NS, late=frozenset({"kernel_log"}), kernel_problem="grew too fast")),
    ],
)
def test_a_required_check_that_a_user_can_have_held_up_says_so(tmp_path: Path, check: str, evidence: Evidence) -> None:
    devices = 'gpus = 8\nnvme = 1\ndisks = ["sda"]\n'
    rules = policy(tmp_path, f"[{check}]\nrequired = true\n[inventory]\n{devices}")
    assert [(one.severity, one.could_not_run, one.user_made) for one in events(rules, check, evidence)] == [
        ("high", True, True)
    ]
    broken = msgspec.structs.replace(
        evidence, late=frozenset(), outputs={key: Output(problem="needs root") for key in evidence.outputs}
    )
    assert [(one.could_not_run, one.user_made) for one in events(rules, check, broken)] == [(True, False)]


def test_exit_codes_are_those_of_nagios() -> None:
    def event(severity: str, failed: bool = False) -> HealthEvent:
        return HealthEvent(check="c", severity=severity, seen_ns=1, could_not_run=failed)  # type: ignore[arg-type]

    assert nagios_exit_code([event("ok")]) == 0
    assert nagios_exit_code([event("ok"), event("warn")]) == 1
    assert nagios_exit_code([event("warn"), event("low")]) == 2
    assert nagios_exit_code([event("ok"), event("ok", failed=True)]) == 0
    assert nagios_exit_code([event("ok"), event("ok", failed=True)], asked=True) == 3
    assert nagios_exit_code([event("ok", failed=True)]) == 3, "nothing was found out"


def test_a_check_that_is_named_runs_although_it_is_disabled(tmp_path: Path) -> None:
    rules = policy(tmp_path, "[mounts]\nenabled = false\n")
    assert "mounts" not in [check.name for check in chosen_checks(rules)]
    assert [check.name for check in chosen_checks(rules, ["mounts"])] == ["mounts"]
    with pytest.raises(UsageError, match="no check 'mount'"):
        chosen_checks(rules, ["mount"])


def test_programs_of_the_site_speak_the_protocol_of_nagios(tmp_path: Path) -> None:
    rules = policy(
        tmp_path, '[[programs]]\nname = "raid"\nargv = ["/usr/lib/nagios/plugins/check_raid"]\ncritical = "high"\n'
    )
    for code, severity, failed in (
        (0, "ok", False),
        (1, "warn", False),
        (2, "high", False),
        (3, "ok", True),
        (127, "ok", True),
    ):
        text = "RAID DEGRADED: md0 | disks=7;7;6;0;8 'time of day'=1.5s\n"
        (event,) = events(rules, "raid", Evidence(now_ns=NOW_NS, outputs={"program:raid": Output(text, code)}))
        assert (event.severity, event.could_not_run) == (severity, failed)
        assert "RAID DEGRADED: md0" in event.words


def test_perfdata() -> None:
    found = parse_perfdata("disks=7;7;6;0;8 'time of day'=1.5s /=2643MB;5948;5958;0;5968 rubbish = =3 x=y")
    assert [(one.label, one.value, one.unit, one.limits) for one in found] == [
        ("disks", 7, "", "7;6;0;8"),
        ("time of day", 1.5, "s", ""),
        ("/", 2643, "MB", "5948;5958;0;5968"),
    ]


@settings(max_examples=30)
@given(st.text(max_size=600), st.text(max_size=600), st.text(max_size=600))
def test_an_event_is_always_a_line_that_others_can_read(words: str, part: str, cause: str) -> None:
    finding = Finding(severity="low", words=words, part=part, cause=cause, serial=part)
    line = msgspec.json.encode(as_event("check", finding, CheckSettings(), 1))
    assert b"\n" not in line
    assert len(line) <= MAX_LINE_BYTES
    assert msgspec.json.decode(line, type=HealthEvent).check == "check"


@settings(max_examples=30)
@given(st.text(max_size=300))
def test_no_output_of_a_tool_ends_a_round(text: str) -> None:
    sources = ("df", "smartctl:sda", "chronyc", "timedatectl", "ipmitool_sel", "ipmitool_sdr", "nvidia_smi", "dcgmi")
    more = ("nvlink_status", "nvlink_errors", "dmidecode")
    files = dict.fromkeys(("proc/self/mountinfo", "sys/devices/system/cpu/online", "proc/1/stat", "proc/meminfo"), text)
    evidence = Evidence(now_ns=NOW_NS, outputs=dict.fromkeys((*sources, *more), Output(text)), files=files)
    rules = HealthPolicy()
    for event in judge_round(CHECKS, evidence, rules).events:
        assert "the check failed" not in event.words, event


def test_the_paper_s_table_of_xids() -> None:
    """Table V of arXiv:2408.14158."""
    rows = {
        "software": (13, 31, 43, 45),
        "nvlink": (74,),
        "memory": (63, 64, 94, 95),
        "uncorrectable": (44, 48, 61, 62, 69, 79),
        "gsp": (119,),
    }
    assert rows == TABLE_V
    for kind, numbers in rows.items():
        assert {XIDS[number].kind for number in numbers} == {kind}
        assert {XIDS[number].user_made for number in numbers} == {kind == "software"}


def test_state_is_kept_and_replaced(tmp_path: Path) -> None:
    state = StateFile(str(tmp_path / "own" / "health"))
    assert state.load() == (None, "")
    for value in (1, 2):
        counters = Counters(boot="b", checks={"c": CheckCounters(seen_ns=3, values={"k": value})})
        state.save(counters)
        assert StateFile(str(tmp_path / "own" / "health")).load() == (counters, "")
    assert os.listdir(tmp_path / "own" / "health") == ["counters.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"checks":{"c":{"seen_ns":-1}}}',
        b'{"unknown":1}',
        b"[" * 5000,
        b"\xff",
        b" " * (MAX_STATE_BYTES + 1),
    ],
)
def test_a_state_file_that_somebody_else_wrote_is_not_used_and_told(tmp_path: Path, content: bytes) -> None:
    state = StateFile(str(tmp_path / "health"))
    (tmp_path / "health" / "counters.json").write_bytes(content)
    counters, problem = state.load()
    assert counters is None
    assert "counters.json" in problem


def test_a_link_or_a_pipe_is_no_state_file(tmp_path: Path) -> None:
    state = StateFile(str(tmp_path / "health"))
    path = tmp_path / "health" / "counters.json"
    os.mkfifo(path)
    assert state.load()[0] is None
    path.unlink()
    other = tmp_path / "other.json"
    other.write_bytes(msgspec.json.encode(Counters()))
    path.symlink_to(other)
    assert state.load()[0] is None
    state.save(Counters())
    assert not path.is_symlink()


def test_a_state_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="only this user may write to"):
        StateFile(str(tmp_path))


def test_counters_of_another_start_of_the_node_are_not_compared_with() -> None:
    rules = HealthPolicy()
    checks = chosen_checks(rules, ["gpu_xid"])
    then = judge_round(checks, Evidence(now_ns=NOW_NS, boot="a", kernel=(XID_79,), kernel_sequence=900), rules)
    again = judge_round(checks, Evidence(now_ns=NOW_NS, boot="b", kernel=(XID_79,)), rules, then.counters)
    assert [event.cause for event in again.events] == ["xid_79"]


def test_a_check_that_could_not_run_keeps_its_counters() -> None:
    rules = HealthPolicy()
    checks = chosen_checks(rules, ["ipmi_log"])
    kept = Counters(boot="b", checks={"ipmi_log": CheckCounters(seen_ns=1, values={"ipmi_log:last": 4})})
    failed = judge_round(checks, Evidence(now_ns=NOW_NS, boot="b"), rules, kept)
    assert failed.events[0].could_not_run
    assert failed.counters == kept


def test_the_policy_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('group = "one"\n')
    file = PolicyFile(str(path))
    assert file.current() == (HealthPolicy(group="one"), "")
    path.write_text("group = 2 # wrong\n")
    rules, problem = file.current()
    assert rules.group == "one"
    assert "the policy from before is in force" in problem
    path.write_text('group = "three"\n')
    assert file.current() == (HealthPolicy(group="three"), "")
    path.unlink()
    assert file.current()[0].group == "three"
