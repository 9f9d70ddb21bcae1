"""What hosts are asked and given before a start, and what they may answer."""

from __future__ import annotations

import hashlib
import platform
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.support.loops import on_loop

import fireflyer
from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.facts import Answer
from fireflyer.cluster.launcher.preflight import (
    HostsRefused,
    admission,
    ask_by_ssh,
    check_hosts,
    check_joined,
    settings_for_hosts,
)
from fireflyer.cluster.schema.hosts import HostFacts
from fireflyer.cluster.schema.job import JobSpec, Remote


def answer(facts: HostFacts) -> Answer:
    """Of a host whose clock is right."""
    return Answer(facts, facts.time_ns, facts.time_ns)


@on_loop
async def test_a_host_that_prints_without_end_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    shell = Remote(shell=("sh", "-c", "exec yes"))
    spec = JobSpec(script=str(script), run_dir=str(tmp_path), hosts=("a",), remote=shell)
    ask = partial(ask_by_ssh, shell)
    with pytest.raises(HostsRefused, match="printed more than 256 KiB"):
        await check_hosts(spec, ask, run_dir=str(tmp_path), workdir=str(tmp_path), control_port=0)


def test_a_machine_joins_again_at_the_address_that_the_others_know(tmp_path: Path) -> None:
    """That of the interface that was chosen, where one was, and not that of its connection to the launcher."""
    script = tmp_path / "train.py"
    script.touch()
    spec = JobSpec(script=str(script), run_dir=str(tmp_path), hosts=("a", "b", "c"))
    facts = HostFacts(
        version=fireflyer.__version__, python=platform.python_version(), hostname="b", boot_id="x",
        namespace="net:[1]", uid=0, cores=2, gpus=0, has_workdir=True, has_script=True, shares_run_dir=False,
        script_sha256=hashlib.sha256(b"").hexdigest(), client="", server="", time_ns=1000,
    )  # fmt: skip
    on_another_network = msgspec.structs.replace(facts, address="10.1.0.2")
    known = {1: answer(msgspec.structs.replace(facts, boot_id="y")), 2: answer(on_another_network)}
    machines = check_joined(spec, known, {1: "10.0.0.1", 2: "10.0.0.2"}, here="10.0.0.9", run_dir=str(tmp_path))
    admit = admission(spec, machines)
    admit(1, answer(facts), "10.0.0.1")
    admit(2, answer(on_another_network), "10.0.0.7")
    with pytest.raises(UsageError, match=r"b was at 10\.0\.0\.1, and this one is at 10\.0\.0\.7"):
        admit(1, answer(facts), "10.0.0.7")
    with pytest.raises(UsageError, match=r"has another .*train\.py"):
        admit(1, answer(msgspec.structs.replace(facts, script_sha256="ab")), "10.0.0.1")


def test_hosts_are_given_our_settings_and_no_more_than_they_read() -> None:
    given = {"FF_TUNE": "1", "FF_SECRET_FILE": "secret", "PYTHONPATH": "/a", "HOME": "/root"}
    assert settings_for_hosts(given) == {"FF_TUNE": "1", "PYTHONPATH": "/a"}
    with pytest.raises(UsageError, match="PYTHONPATH"):
        settings_for_hosts({"PYTHONPATH": "/a:" * 10_000})
