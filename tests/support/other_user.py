"""What another user of the machine can do to a process of ours: `python -m tests.support.other_user JSON`, as root."""

from __future__ import annotations

import json
import os
import socket
import sys

from fireflyer.native import can_access

NOBODY = 65534


def main() -> None:
    arguments = json.loads(sys.argv[1])
    pid = arguments["pid"]
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    reached = [path for path in (f"/proc/{pid}/{name}" for name in ("fd", "map_files", "maps", "mem")) if reaches(path)]
    if can_access(*arguments["probe"]):
        reached.append("memory")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0{arguments['unix']}")
        sock.sendall(b"\0\3abc")
        answer = sock.recv(4096)
    print(json.dumps({"reached": reached, "answer": answer.hex(), "user": os.getuid()}))


def reaches(path: str) -> bool:
    try:
        if os.path.isdir(path):
            return any(os.open(os.path.join(path, name), os.O_RDONLY) >= 0 for name in os.listdir(path))
        with open(path, "rb") as file:
            return len(file.read(1)) > 0
    except OSError:
        return False


if __name__ == "__main__":
    main()
