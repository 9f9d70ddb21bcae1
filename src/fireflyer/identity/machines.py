"""Machines that have joined, on the side that lets them join: `ff agent token` writes here, `ff run` reads.

A join token is a token of `TokenStore` whose user is the machine. It is single-use: `redeem` removes it, under the
file's lock, before the credential is made, so of several who have a copy one wins. It expires by this side's clock.
The credential is that of one machine and can be revoked. Both files are as good as the credentials in them: mode 0600,
in a directory of mode 0700.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, NotFound, PermissionDenied, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.identity.derived import derive_credential
from fireflyer.identity.handshake import NONCE_BYTES, UserKey
from fireflyer.identity.private_files import lock_file, read_private_file, require_own_directory, write_private_file
from fireflyer.identity.tokens import TokenStore

__all__ = ["MAX_MACHINES", "Bought", "JoinedMachine", "MachineStore"]

MAX_MACHINES: Final = 10_000
_MAX_FILE_BYTES: Final = 16 << 20
_VERSION: Final = 1
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class JoinedMachine(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    address: str
    """Host name or address at which its agent is reached."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    credential: str
    joined_s: int
    """Unix time."""

    def __repr__(self) -> str:
        return f"JoinedMachine({self.name} at {self.address}:{self.port})"


class Bought(msgspec.Struct, frozen=True, kw_only=True):
    """From which a machine computes its credential; no secret."""

    machine: str
    token_id: str
    nonce: bytes


class _File(msgspec.Struct, kw_only=True):
    version: int
    machines: list[JoinedMachine]


class MachineStore:
    """In the directory `path`, which is made. Several processes may use one. Raises `PermissionDenied` where others
    may read or write there, `DataCorruption` for files that this class did not write."""

    def __init__(self, path: str) -> None:
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
        except OSError as error:
            raise translate_os_error(error, f"make {path}") from error
        require_own_directory(path)
        self._path = os.path.join(path, "machines.json")
        self._tokens = TokenStore(os.path.join(path, "join-tokens.json"))

    def issue(self, name: str, now_s: int, lifetime_s: int) -> str:
        """A join token; others of this machine are not valid any more. Raises `UsageError`."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"machine name {name[:80]!r} must be 1 to 64 letters, digits, '.', '_' or '-', and not begin with a "
                "digit"
            )
        self.withdraw(name)
        self._tokens.create_user(name, now_s)
        return self._tokens.issue(name, now_s, lifetime_s=lifetime_s, label="join")

    def withdraw(self, name: str) -> None:
        """The join token of the machine, if there is one, is not valid any more."""
        with contextlib.suppress(NotFound):
            self._tokens.remove_user(name)

    def find(self, token_id: str, now_s: int) -> UserKey | None:
        """As `TokenStore.find`, of join tokens: for `Accepts`."""
        return self._tokens.find(token_id, now_s)

    def redeem(self, token_id: str, *, machine: str, address: str, port: int, now_s: int) -> Bought:
        """The machine has proven that it has the join token of this number. Raises `PermissionDenied` where the token
        is used, expired, or another machine's."""
        refused = PermissionDenied(f"the join token of {machine} is used, withdrawn or expired; make another one")
        found = self._tokens.find(token_id, now_s)
        if found is None or found.user != machine:
            raise refused
        try:
            self._tokens.revoke(token_id)
        except NotFound:  # another one with a copy of the token was faster
            raise refused from None
        bought = Bought(machine=machine, token_id=secrets.token_hex(8), nonce=secrets.token_bytes(NONCE_BYTES))
        credential = derive_credential(found.key, token_id=bought.token_id, nonce=bought.nonce)
        entry = JoinedMachine(name=machine, address=address, port=port, credential=credential, joined_s=now_s)
        with self._changing() as machines:
            if machine not in machines and len(machines) >= MAX_MACHINES:
                raise UsageError(f"{MAX_MACHINES} machines have joined, the maximum; revoke some")
            machines[machine] = entry
        return bought

    def revoke(self, name: str) -> JoinedMachine:
        """From now on the machine is not used, and its join token is not valid. Raises `NotFound`."""
        self.withdraw(name)
        with self._changing() as machines:
            entry = machines.pop(name, None)
        if entry is None:
            raise NotFound(f"no machine {name[:80]!r} has joined; `ff agent machines` shows them")
        return entry

    def machines(self) -> dict[str, JoinedMachine]:
        try:
            data = read_private_file(self._path, _MAX_FILE_BYTES)
        except NotFound:
            return {}
        try:
            content = decode_json(data, _File)
        except DECODE_ERRORS as error:
            raise DataCorruption(f"{self._path} is damaged: {error}; restore it, or let machines join again") from None
        if content.version != _VERSION:
            raise DataCorruption(
                f"{self._path} has format version {content.version}, this release reads {_VERSION}; install a newer one"
            )
        return {machine.name: machine for machine in content.machines}

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, JoinedMachine]]:
        with lock_file(f"{self._path}.lock"):
            machines = self.machines()
            yield machines
            content = _File(version=_VERSION, machines=[machines[name] for name in sorted(machines)])
            write_private_file(self._path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
