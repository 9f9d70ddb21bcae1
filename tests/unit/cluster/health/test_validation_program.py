"""`fireflyer:validate`, the validators of the release as the test of a node before it returns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from tests.support.patience import allowed_s

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.health import validation_event
from fireflyer.cluster.agent.health_program import Printed, refused, run_health_program


def test_managers_give_the_validators_names_times_and_files_of_root() -> None:
    assert refused(("fireflyer:validate", "--time", "1m", "--only", "memory", "--only", "storage")) == ""
    others = ("--directory", "/etc"), ("--record", "/etc/passwd"), ("--model", "m"), ("--time", "-1"), ("--json",)
    for arguments in others:
        assert "is not run as root" in refused(("fireflyer:validate", *arguments))
    assert "is not read as root" in refused(("fireflyer:validate", "--peers", "/home/eve/records.jsonl"))


def test_the_validators_write_into_the_directory_of_the_agent(tmp_path: Path) -> None:
    options = ("--only", "storage", "--time", "1s")
    printed = asyncio.run(
        run_health_program(("fireflyer:validate", *options), round(allowed_s(60)) * SECOND, str(tmp_path))
    )
    assert (printed.exit_code, printed.failure) == (0, "")
    (event,) = (msgspec.json.decode(line, type=HealthEvent) for line in printed.lines)
    assert (event.check, event.severity) == ("storage", "ok")
    assert validation_event(printed, "fireflyer:validate").words == "1 validator passed"
    assert list(tmp_path.iterdir()) == []


def test_a_validator_that_finds_a_fault_names_it() -> None:
    lines = [
        HealthEvent(check="memory", severity="ok", words="1 GiB", seen_ns=1),
        HealthEvent(check="repeated", severity="high", words="2 of 50 results differ", seen_ns=1),
        HealthEvent(check="storage", severity="warn", words="slow", seen_ns=1),
    ]
    printed = Printed(tuple(map(msgspec.json.encode, lines)), 2)
    event = validation_event(printed, "fireflyer:validate")
    assert (event.check, event.severity, event.words) == ("validation", "high", "repeated: 2 of 50 results differ")
    warned = validation_event(Printed(tuple(map(msgspec.json.encode, lines[::2])), 1), "fireflyer:validate")
    assert (warned.severity, warned.could_not_run) == ("warn", True)
    assert warned.words.endswith("exited with code 1, which is neither 0 nor 2: storage: slow")
    assert validation_event(Printed((b"not json",), 2), "fireflyer:validate").words == "not json"
