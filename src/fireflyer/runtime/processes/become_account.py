"""Becomes a command of another account. Runs as a program of its own, by root, below a guard that stays root's.

    python -I -S become_account.py ACCOUNT KEPT command argument ...

ACCOUNT is JSON: uid, gid, groups, name, home, shell. KEPT are numbers of descriptors that the command gets, separated
by commas, beside the three standard ones; all others are closed. The environment is that of a login: HOME, USER and
so on, and what the guard needs of its own; nothing of root's is left in it. With `keeps_environment` in ACCOUNT, beside
uid, gid, groups and home, it is that of this program, which was made for the command.

The kernel forgets the parent-death signal when a process changes its account, so it is asked for again, and the parent
compared, after that. Standard library only. Exit code 126: it could not become the account.
"""

import ctypes
import json
import os
import signal
import sys

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
_FROM_GUARD = ("FF_JOB_TOKEN", "FF_LEASE_FD", "LANG", "TZ", "FIREFLYER_FS")


def environment_of(account: dict[str, str], environ: dict[str, str]) -> dict[str, str]:
    """Of the command."""
    kept = {name: environ[name] for name in _FROM_GUARD if name in environ}
    login = {"HOME": account["home"], "USER": account["name"], "LOGNAME": account["name"], "SHELL": account["shell"]}
    return {"PATH": _PATH, "LANG": "C.UTF-8", **kept, **login}


def _close_others(kept: list[int]) -> None:
    wanted = sorted({0, 1, 2, *kept})
    for low, high in zip(wanted, [*wanted[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)


def main(account_json: str, kept: str, command: list[str]) -> int:
    """Returns only when it cannot be done."""
    try:
        account = json.loads(account_json)
        uid, gid = int(account["uid"]), int(account["gid"])
        if uid == 0 or gid == 0 or 0 in account["groups"]:
            os.write(2, b"error: this account has rights of root\n")
            return 126
        lease = os.environ.get("FF_LEASE_FD", "")
        _close_others([int(number) for number in (*kept.split(","), lease) if number.isdigit()])
        parent = os.getppid()
        os.setgroups([int(group) for group in account["groups"]])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return 126
        os.umask(0o077)
        os.chdir(account["home"] if os.access(account["home"], os.X_OK) else "/")
        environment = dict(os.environ)
        if not account.get("keeps_environment"):
            environment = environment_of(account, environment)
        os.execve(command[0], command, environment)  # noqa: S606
    except (OSError, ValueError, KeyError, TypeError) as error:
        os.write(2, f"error: cannot become the account: {error}\n".encode(errors="replace"))
    return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
