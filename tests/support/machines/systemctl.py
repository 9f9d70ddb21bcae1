"""Stands in for systemctl(1) on a machine without systemd: runs the process of one unit of `Type=notify` as the unit
says, tells when it has said that it is ready, reloads and stops it.

It reads the units in /etc/systemd/system. It starts nothing again (`Restart=`), and knows no dependencies and limits.
Standard library only: it is copied to the machine.
"""

import configparser
import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys

__all__ = ["RUN", "main"]

UNITS = "/etc/systemd/system"
RUN = "/run/units"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main(words: list[str]) -> int:
    verb, *names = [word for word in words if not word.startswith("-")]
    if "--now" in words:
        verb = {"enable": "start", "disable": "stop"}[verb]
    os.makedirs(RUN, exist_ok=True)
    for name in names:
        unit = Unit(name.removesuffix(".service"))
        code = {"start": unit.start, "stop": unit.stop, "restart": unit.restart, "reload": unit.reload}[verb]()
        if code != 0:
            return code
    return 0 if names or verb == "daemon-reload" else 1


class Unit:
    def __init__(self, name: str) -> None:
        self.name = name
        read = configparser.RawConfigParser(strict=False)
        read.optionxform = str  # type: ignore[assignment,method-assign]
        if not read.read(f"{UNITS}/{name}.service"):
            raise SystemExit(f"Unit {name}.service could not be found.")
        self.service = read["Service"]
        if self.service["Type"] != "notify" or self.service.get("KillMode", "") != "process":
            raise SystemExit(f"this stand-in runs no unit such as {name}.service")

    def start(self) -> int:
        if self._main() is not None:
            return 0
        path = f"{RUN}/{self.name}.notify"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, open(f"{RUN}/journal", "ab") as log:
            told.bind(path)
            process = subprocess.Popen(
                self._words("ExecStart"), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                env={"PATH": PATH, "NOTIFY_SOCKET": path}, start_new_session=True,
            )  # fmt: skip
            with open(f"{RUN}/{self.name}.pid", "w", encoding="ascii") as file:
                file.write(str(process.pid))
            ended = os.pidfd_open(process.pid)
            while True:
                ready, _, _ = select.select([told.fileno(), ended], [], [])
                if told.fileno() in ready and b"READY=1" in told.recv(4096).split(b"\n"):
                    process.returncode = 0  # the first process of the machine reaps it
                    return 0
                if ended in ready:
                    sys.stderr.write(f"Job for {self.name}.service failed; see {RUN}/journal\n")
                    return 1

    def stop(self) -> int:
        pid = self._main()
        if pid is not None:
            ended = os.pidfd_open(pid)
            os.kill(pid, signal.SIGTERM)
            select.select([ended], [], [])
        return 0

    def restart(self) -> int:
        self.stop()
        return self.start()

    def reload(self) -> int:
        pid = self._main()
        if pid is None:
            sys.stderr.write(f"{self.name}.service is not active, cannot reload.\n")
            return 1
        return subprocess.run(
            [word.replace("$MAINPID", str(pid)) for word in shlex.split(self.service["ExecReload"])], check=False
        ).returncode

    def _words(self, key: str) -> list[str]:
        return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(self.service[key])]

    def _main(self) -> int | None:
        """The process of the unit, where it lives."""
        try:
            with open(f"{RUN}/{self.name}.pid", encoding="ascii") as file:
                pid = int(file.read())
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                return None if file.read().rpartition(")")[2].split()[0] in "ZX" else pid
        except (OSError, ValueError):
            return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
