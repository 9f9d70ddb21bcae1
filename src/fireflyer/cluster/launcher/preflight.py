"""Every host is asked before anything is started, all at once, and all faults are shown together."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import starmap
from typing import Protocol

import msgspec

import fireflyer
from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.cluster.core.facts import (
    Answer,
    HostRequirements,
    faults_of,
    mixed_addresses,
    port_fault,
    same_machine,
)
from fireflyer.cluster.launcher.checks import RANKS_PER_CORE
from fireflyer.cluster.launcher.machines import HERE, Machine, remote_command
from fireflyer.cluster.schema.hosts import FACTS_MARK, MAX_ORDERS_BYTES, HostFacts, HostNetwork, HostQuestion
from fireflyer.cluster.schema.job import JobSpec, Remote
from fireflyer.runtime.disk import translate_os_error
from fireflyer.runtime.interfaces import own_addresses
from fireflyer.runtime.master_port import count_free_ports

__all__ = [
    "AskHost",
    "HostsRefused",
    "admission",
    "ask_by_ssh",
    "check_hosts",
    "check_joined",
    "marked_directory",
    "settings_for_hosts",
]

_ANSWER_S = 60.0
_AT_ONCE = 64
_MAX_ANSWER_BYTES = 256 << 10
_MAX_SETTINGS_BYTES = MAX_ORDERS_BYTES // 2
"""The other half of what a host reads at its start is for the rest."""
_JOINED_WORKDIR = "its working directory"
_FORWARDED = ("PYTHONPATH", "LD_LIBRARY_PATH")
_OF_THIS_MACHINE = ("FF_SECRET_FILE", "FF_ADDRESS", "FF_HOST")


class HostsRefused(UsageError):
    """Some hosts cannot run the job. `rows`: (host, fault)."""

    def __init__(self, rows: list[tuple[str, str]], hosts: int) -> None:
        self.rows = rows
        bad = len({host for host, _ in rows})
        first = f"{rows[0][0]} {rows[0][1]}"
        super().__init__(f"{bad} of {hosts} hosts cannot run this job: {first}")


def settings_for_hosts(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks on other machines are given of the launcher's environment, beside --env: our own settings, and where
    Python and programs find what they load. The rest is what a login gives there. Raises `UsageError`."""
    ours = {name: value for name, value in environ.items() if name.startswith("FF_") and name not in _OF_THIS_MACHINE}
    given = {name: environ[name] for name in _FORWARDED if name in environ} | ours
    given_bytes = len(msgspec.json.encode(given))
    if given_bytes > _MAX_SETTINGS_BYTES:
        longest = max(given, key=lambda name: len(given[name]))
        raise UsageError(
            f"settings for the hosts have {given_bytes} bytes, and {_MAX_SETTINGS_BYTES} are allowed; "
            f"shorten {longest}, or set it on the hosts"
        )
    return given


def _required(spec: JobSpec, workdir: str, number: int) -> HostRequirements:
    """Of the host of this number."""
    first = number == 0
    return HostRequirements(
        version=fireflyer.__version__,
        python=platform.python_version(),
        workdir=workdir,
        script=spec.script,
        kind=spec.kind,
        script_sha256=_sha256(spec.script) if spec.kind == "script" else "",
        ranks=spec.ranks_on(number),
        ranks_per_core=RANKS_PER_CORE,
        devices=spec.devices,
        knows_control_address=bool(spec.remote.address),
        ports=str(spec.ports or ""),
        ports_needed=_ports_needed(spec, spec.ranks_on(number), first=first),
        master_port=spec.master_port if first else 0,
    )


def _ports_needed(spec: JobSpec, ranks: int, *, first: bool) -> int:
    """With one group of all ranks: a port for each of the ranks there, one in each network while they meet, and on the
    first host MASTER_PORT."""
    return 0 if spec.ports is None else ranks + len(spec.addresses.each()) + first


class AskHost(Protocol):
    """Puts the question to the host of this name; returns its answer, or why there is none."""

    async def __call__(self, name: str, question: HostQuestion) -> HostFacts | str: ...


async def check_hosts(
    spec: JobSpec, ask_host: AskHost, *, run_dir: str, workdir: str, control_port: int
) -> list[Machine]:
    """The machines of `spec.hosts`, in order. `control_port`: at which this launcher listens. Raises `HostsRefused`."""
    faults: dict[str, list[str]] = {name: [] for name in spec.hosts}
    facts: dict[str, HostFacts] = {}
    some = asyncio.Semaphore(_AT_ONCE)
    with _question(spec, run_dir, workdir, control_port) as question:

        async def ask(number: int, name: str) -> None:
            async with some:
                asked_ns = time.time_ns()
                answer = await ask_host(name, question)
                if isinstance(answer, str):
                    faults[name].append(answer)
                else:
                    facts[name] = answer
                    required = _required(spec, workdir, number)
                    faults[name] += faults_of(Answer(answer, asked_ns, time.time_ns()), required)

        await asyncio.gather(*(ask(number, name) for number, name in enumerate(spec.hosts)))
        _refuse(spec, facts, faults, {name: _addresses_of(one) for name, one in facts.items()})
    return _machines(spec, [facts[name] for name in spec.hosts], run_dir)


def _addresses_of(facts: HostFacts) -> tuple[str, ...]:
    """That were chosen."""
    return (facts.address, *(one.address for one in facts.more_networks)) if facts.address else ()


def _refuse(
    spec: JobSpec,
    facts: Mapping[str, HostFacts],
    faults: Mapping[str, list[str]],
    chosen: Mapping[str, tuple[str, ...]],
) -> None:
    """Raises `HostsRefused` where there are faults."""
    for name, fault in mixed_addresses({name: chosen[name] for name in spec.hosts if name in chosen}):
        faults[name].append(fault)
    known = {} if spec.remote.share_machine else {name: facts[name] for name in spec.hosts if name in facts}
    for one, other in same_machine(known):
        faults[other].append(f"is the same machine as {one}; name each machine once")
    rows = [(name, fault) for name in spec.hosts for fault in faults[name]]
    if rows:
        raise HostsRefused(rows, len(spec.hosts))


@contextlib.contextmanager
def marked_directory(spec: JobSpec, run_dir: str) -> Iterator[HostQuestion]:
    """The question for machines that join while this lasts; they have reached the launcher."""
    with _question(spec, run_dir, os.getcwd(), 0) as question:
        yield question


@contextlib.contextmanager
def _question(spec: JobSpec, run_dir: str, workdir: str, control_port: int) -> Iterator[HostQuestion]:
    """Raises `FireflyerError`."""
    stream_dir = os.path.abspath(spec.stream_dir) if spec.stream_dir else ""
    with contextlib.ExitStack() as stack:
        mark = f".shared-{secrets.token_hex(16)}"  # nobody can guess it: who sees it shares the directory
        stack.enter_context(_mark_in(run_dir, mark))
        if stream_dir:
            stack.enter_context(_mark_in(stream_dir, mark))
        yield HostQuestion(
            workdir=workdir,
            script=spec.script,
            kind=spec.kind,
            run_dir=run_dir,
            mark=mark,
            stream_dir=stream_dir,
            addresses=spec.addresses,
            ports=spec.ports,
            ports_needed=_ports_needed(spec, spec.ranks_per_node, first=True),
            master_port=spec.master_port,
            control_port=control_port,
            control_address=spec.remote.address,
        )


def check_joined(
    spec: JobSpec, answers: Mapping[int, Answer], addresses: Mapping[int, str], *, here: str, run_dir: str
) -> dict[int, Machine]:
    """The launcher's machine, of address `here` unless another one is chosen, and those that joined it, by number.
    Raises `HostsRefused`."""
    facts = {number: one.facts for number, one in answers.items()}
    named = {spec.hosts[number]: one for number, one in facts.items()}
    faults = {name: _joined_faults(spec, number, answers[number]) if number in answers else []
              for number, name in enumerate(spec.hosts)}  # fmt: skip
    own_ports = _ports_needed(spec, spec.ranks_on(0), first=True)
    free = 0 if spec.ports is None else count_free_ports(spec.ports, own_ports)
    faults[spec.hosts[0]] += port_fault(free, _required(spec, _JOINED_WORKDIR, 0))
    found = own_addresses() if spec.addresses else []
    networks = spec.addresses.choose_all(found)
    complete = len(networks) == len(spec.addresses.each())
    (interface, chosen), *more = networks if complete and networks else [("", "")]
    if spec.addresses and not chosen:
        faults[spec.hosts[0]].append(spec.addresses.fault(found))
    own_networks = {spec.hosts[0]: tuple(address for _, address in networks) if complete else ()}
    _refuse(spec, named, faults, own_networks | {name: _addresses_of(one) for name, one in named.items()})
    own = Machine(
        number=0,
        name=spec.hosts[0],
        address=chosen or here,
        launcher=here,
        directory=run_dir,
        shared=True,
        chosen=bool(chosen),
        interface=interface,
        more_networks=tuple(starmap(HostNetwork, more)),
    )
    joined = {
        number: _joined_machine(spec, number, facts[number], addresses[number], here=here, run_dir=run_dir)
        for number in sorted(facts)
    }
    return {0: own, **joined}


def check_late(spec: JobSpec, number: int, answer: Answer, address: str, *, here: str, run_dir: str) -> Machine:
    """A machine that joins for the first time after the job has begun. Raises `UsageError`, which is told there."""
    faults = _joined_faults(spec, number, answer)
    if faults:
        raise UsageError(f"{spec.hosts[number]} cannot run this job: it {faults[0]}")
    return _joined_machine(spec, number, answer.facts, address, here=here, run_dir=run_dir)


def _joined_machine(spec: JobSpec, number: int, facts: HostFacts, address: str, *, here: str, run_dir: str) -> Machine:
    return Machine(
        number=number,
        name=spec.hosts[number],
        address=facts.address or address,
        launcher=here,
        directory=run_dir,
        shared=facts.shares_run_dir,
        chosen=bool(facts.address),
        interface=facts.interface,
        more_networks=facts.more_networks,
    )


def admission(spec: JobSpec, machines: Mapping[int, Machine]) -> Callable[[int, Answer, str], None]:
    """Checks a machine that joins again, during the job, as it was checked before: number, answer, address. Raises
    `UsageError`: with another script it would train another model, and the others would not find another address. What
    it ran before may still have its ports."""

    def admit(number: int, answer: Answer, address: str) -> None:
        required = _required(spec, _JOINED_WORKDIR, number)
        faults = faults_of(answer, msgspec.structs.replace(required, ports_needed=0, master_port=0))
        facts = answer.facts
        was, now = machines[number].addresses, ",".join(_addresses_of(facts) or (address,))
        if now != was:
            faults.append(f"was at {was}, and this one is at {now}; start it there")
        if faults:
            raise UsageError(f"{spec.hosts[number]} {faults[0]}")

    return admit


def _joined_faults(spec: JobSpec, number: int, answer: Answer) -> list[str]:
    return faults_of(answer, _required(spec, _JOINED_WORKDIR, number))


def _machines(spec: JobSpec, facts: list[HostFacts], run_dir: str) -> list[Machine]:
    token = secrets.token_hex(8)
    elsewhere = [one.client for one in facts if one.client and not _is_loopback(one.client)]
    machines = []
    for number, (name, one) in enumerate(zip(spec.hosts, facts, strict=True)):
        address = one.address or one.server or name
        if _is_loopback(address) and elsewhere and not one.address:
            address = elsewhere[0]  # this machine, as the others see it
        directory = os.path.join(tempfile.gettempdir(), f"fireflyer-{one.uid}", token)
        machines.append(
            Machine(
                number=number,
                name=name,
                address=address,
                launcher=spec.remote.address or one.client or HERE,
                directory=run_dir if one.shares_run_dir else directory,
                shared=one.shares_run_dir,
                chosen=bool(one.address),
                interface=one.interface,
                more_networks=one.more_networks,
            )
        )
    return machines


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


async def ask_by_ssh(remote: Remote, name: str, question: HostQuestion) -> HostFacts | str:
    """As `AskHost`."""
    command = [*remote.shell, name, remote_command(remote.python, "probe")]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return f"cannot be asked: {translate_os_error(error, command[0])}"
    try:
        async with asyncio.timeout(_ANSWER_S):
            said, errors = await _answer_of(process, msgspec.json.encode(question) + b"\n")
    except TimeoutError:
        return f"did not answer within {_ANSWER_S:g} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if len(said) > _MAX_ANSWER_BYTES or len(errors) > _MAX_ANSWER_BYTES:
        return f"printed more than {_MAX_ANSWER_BYTES >> 10} KiB; see what its shell runs at the start (.bashrc)"
    for line in said.decode(errors="replace").splitlines():
        if line.startswith(FACTS_MARK):
            try:
                return decode_json(line[len(FACTS_MARK) :], HostFacts)
            except DECODE_ERRORS:
                return f"runs another release of Fire-Flyer; install {fireflyer.__version__} there"
    return _why(errors, remote.python, process.returncode)


async def _answer_of(process: asyncio.subprocess.Process, question: bytes) -> tuple[bytes, bytes]:
    """What it prints, and its error messages, or the beginning of what is too long."""
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise InvariantViolation("a program that asks a host is started with three pipes")
    with contextlib.suppress(OSError):  # it has ended already
        process.stdin.write(question)
        process.stdin.close()
    said, errors = await asyncio.gather(_read(process, process.stdout), _read(process, process.stderr))
    await process.wait()
    return said, errors


async def _read(process: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> bytes:
    data = b""
    while piece := await stream.read(_MAX_ANSWER_BYTES):
        if len(data) <= _MAX_ANSWER_BYTES:
            data += piece
        elif process.returncode is None:  # the rest is dropped: a pipe that is left in the middle is never closed
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return data


def _why(errors: bytes, python: str, code: int | None) -> str:
    lines = [line.strip() for line in errors[-4096:].decode(errors="replace").splitlines() if line.strip()]
    last = "".join(char for char in lines[-1] if char.isprintable())[:300] if lines else f"exit code {code}"
    if code == 255:
        return f"cannot be reached: {last}"
    if code in (126, 127):
        return f"has no Python at {python} ({last}); install it there, or name its path with --remote-python"
    return f"cannot run Fire-Flyer with {python}: {last}; install release {fireflyer.__version__} there"


@contextlib.contextmanager
def _mark_in(directory: str, mark: str) -> Iterator[None]:
    """Makes the directory, too; where the job then cannot start it is as it was before."""
    path = os.path.join(directory, mark)
    made = not os.path.lexists(directory)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with open(path, "xb"):
            pass
    except OSError as error:
        raise translate_os_error(error, f"write {path}") from error
    try:
        yield
    except BaseException:
        os.unlink(path)
        if made:
            os.rmdir(directory)
        raise
    os.unlink(path)


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
