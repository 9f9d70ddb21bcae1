"""Machines as an operator finds them: directories of the system that are their own, disks, a service manager, and
terminals at which the commands of a page are typed.

A machine of namespaces has no systemd: `systemctl` is there a stand-in, `tests.support.machines.systemctl`. All else is
what it is on a real machine, at the paths that pages name.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.machines import systemctl
from tests.support.machines.machines import Machine, MachineProcess, Machines
from tests.support.patience import allowed_s

__all__ = ["ANN", "ANN_ID", "EVERY", "Operators", "Typed", "blocks_of", "matches", "prepare"]

ANN: Final = "ann"
ANN_ID: Final = 1201
EVERY: Final = "each"
"""Prompt of commands that are typed on all machines of the cluster."""
LIMIT_S: Final = 120.0
REPEATED: Final = 3
LOOKS: Final = ("ff nodes", "ff fs status")
"""Commands that show what others do: they are typed again until it is done."""
_LATE: Final = ("no manager answered", "did not answer within", "no manager leads")
_END: Final = "\x01"
_PROMPT: Final = re.compile(r"^(?:(?P<user>\w+)@)?(?P<machine>\w+)[#$] (?P<command>.*)$")
_FENCED: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ABBREVIATED: Final = "…"
_PROGRAMS: Final = "/usr/local/sbin"
_PREPARE: Final = f"""
set -e
mount -o remount,bind,rw /
mkdir -p /shared /disk1 /disk2
mount --bind "$1" /shared
cp -a /etc /run/etc
mount --bind /run/etc /etc
mount -t tmpfs -o mode=755 tmpfs /var/lib
mount -t tmpfs -o mode=755 tmpfs {_PROGRAMS}
for disk in /disk1 /disk2; do
    echo "tmpfs $disk tmpfs mode=755 0 0" >> /etc/fstab
    mount $disk
done
mkdir -p /etc/systemd/system
useradd --uid {ANN_ID} --create-home --shell /bin/bash {ANN}
"""
"""$1: the directory that all machines share. What is mounted ends with the machine."""


class Typed(NamedTuple):
    """A command with its prompt in a page, and what the page says it prints."""

    machine: str
    user: str
    command: str
    shown: tuple[str, ...]


def blocks_of(text: str) -> list[tuple[str, list[Typed] | str]]:
    """Fenced blocks with what is before them: the language and the text, or commands where there are prompts."""
    found: list[tuple[str, list[Typed] | str]] = []
    for language, block in _FENCED.findall(text):
        lines = block.splitlines()
        found.append((language, _typed(lines) if lines and _PROMPT.match(lines[0]) else block))
    return found


def _typed(lines: Sequence[str]) -> list[Typed]:
    found: list[Typed] = []
    for line in lines:
        prompt = _PROMPT.match(line)
        if prompt:
            found.append(Typed(prompt["machine"], prompt["user"] or "root", prompt["command"], ()))
        else:
            found[-1] = found[-1]._replace(shown=(*found[-1].shown, line))
    return found


def matches(shown: Sequence[str], printed: str) -> bool:
    """Whether each line of a page was printed, in this order, with anything where the page has "…" and any number of
    blanks where it has some."""
    lines = iter(printed.splitlines())
    patterns = [
        r"\s+".join(".*".join(map(re.escape, word.split(_ABBREVIATED))) for word in line.split()) for line in shown
    ]
    return all(any(re.fullmatch(rf"\s*{pattern}\s*", line) for line in lines) for pattern in patterns)


def prepare(machine: Machine, shared: Path) -> None:
    machine.run(["sh", "-c", _PREPARE, "prepare", str(shared)], check=True)
    _program(machine, "ff", f'#!/bin/sh\nexec {sys.executable} -P -m fireflyer "$@"\n')
    _program(machine, "systemctl", f"#!{sys.executable} -P\n{Path(systemctl.__file__).read_text()}")


def _program(machine: Machine, name: str, text: str) -> None:
    path = machine.path(f"{_PROGRAMS}/{name}")
    path.write_text(text)
    path.chmod(0o755)


class _Terminal:
    """A shell that lives from command to command: what is exported stays."""

    def __init__(self, machine: Machine, user: str) -> None:
        self.name = f"{user}@{machine.name}"
        home = machine.environment()["HOME"] if user == "root" else f"/home/{user}"
        environment = {"HOME": home, "USER": user, "LOGNAME": user}
        self._shell: MachineProcess = machine.start(
            ["runuser", "-u", user, "--", "bash", "--norc"],
            cwd=home,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def type(self, command: str, limit_s: float) -> tuple[int, str]:
        """Its exit code, and what it printed."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        late = threading.Timer(allowed_s(limit_s), self._shell.kill)
        late.start()
        try:
            self._shell.stdin.write(f"{{ {command}\n}} < /dev/null; printf '\\n{_END}%d\\n' $?\n")
            self._shell.stdin.flush()
            lines: list[str] = []
            for line in self._shell.stdout:
                if line.startswith(_END):
                    return int(line[1:]), "".join(lines)[:-1]
                lines.append(line)
        finally:
            late.cancel()
        raise AssertionError(f"{self.name}: {command}: no end within {limit_s} s, or the shell ended\n{''.join(lines)}")


class Operators:
    """Who types what a page says."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._terminals: dict[tuple[str, str], _Terminal] = {}
        self.words: dict[str, str] = {}
        """What a page abbreviates, and what is typed in its place."""
        self.each: tuple[str, ...] = tuple(machines)
        """Machines of the cluster."""

    def type(self, typed: Typed, *, limit_s: float = LIMIT_S) -> str:
        """What it printed. Raises `AssertionError` where it fails, or prints something else than the page says."""
        names = self.each if typed.machine == EVERY else (typed.machine,)
        with ThreadPoolExecutor(len(names)) as beside:
            printed = list(beside.map(lambda name: self._type_at(name, typed, limit_s), names))
        return "".join(printed)

    def type_all(self, commands: Sequence[Typed], *, limit_s: float = LIMIT_S) -> list[str]:
        return [self.type(one, limit_s=limit_s) for one in commands]

    def root(self, machine: str, command: str) -> str:
        """A command that is in no page."""
        return self.type(Typed(machine, "root", command, ()))

    def _type_at(self, name: str, typed: Typed, limit_s: float) -> str:
        command = typed.command
        for word, real in self.words.items():
            command = command.replace(word, real)
        key = (name, typed.user)
        if key not in self._terminals:
            self._terminals[key] = _Terminal(self._machines[name], typed.user)
        code, printed = self._terminals[key].type(command, limit_s)
        for _ in range(REPEATED):  # the host is busy with other tests: who types it waits, and types it again
            if code == 0 or not any(words in printed for words in _LATE):
                break
            code, printed = self._terminals[key].type(command, limit_s)
        look_until_s = time.monotonic() + allowed_s(limit_s)
        while code == 0 and command in LOOKS and not matches(typed.shown, printed) and time.monotonic() < look_until_s:
            code, printed = self._terminals[key].type(command, limit_s)
        assert code == 0, f"{name}: {command}: {code}\n{printed}\n{self.journal()}"
        assert matches(typed.shown, printed), f"{name}: {command} printed\n{printed}\nand not\n" + "\n".join(
            typed.shown
        )
        return printed

    def journal(self) -> str:
        """What the services of all machines have said last."""
        found = []
        for name, machine in self._machines.items():
            log = machine.path(f"{systemctl.RUN}/journal")
            if log.exists():
                found.append(f"--- {name}\n{log.read_text()[-2000:]}")
        return "\n".join(found)
