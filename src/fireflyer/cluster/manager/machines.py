"""Machines that have joined the platform, and join tokens, as rows that all managers read.

    PKma + name     a machine: the key of its credential        PKjt + token id     a join token that waits
    PKve            a counter that every change raises

A join token is used up, and the machine let in, by one transaction: of several who have a copy one wins. The rows hold
keys (`token_key`), from which no token can be made again; they are as good as the credentials for who speaks the
handshake, as the store is in all else. Handshakes look machines up in memory, which is read again when the counter has
changed: a machine that was revoked is out on every manager within `LOOK_S`. A token that is not known in memory is
looked up in the store before it is refused: another manager may have issued it a moment ago.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Collection
from typing import Annotated, Final, TypeVar

import msgspec

from fireflyer.base.decoding import convert
from fireflyer.base.errors import FireflyerError, NotFound, PermissionDenied, TransientError, UsageError
from fireflyer.cluster.core.slurm.request import node_of, slot_name
from fireflyer.identity.derived import derive_credential
from fireflyer.identity.handshake import BEARER_MARK, NONCE_BYTES, UserKey, token_id_of, token_key
from fireflyer.kvstore import Engine, Reader, Transaction, prefix_range
from fireflyer.kvstore.core.rows import decode_row, encode_row

__all__ = [
    "JOIN_MARK",
    "PREFIX",
    "Admission",
    "JoinToken",
    "MachineRow",
    "Machines",
    "forgotten",
    "of_another_store",
]

_log = logging.getLogger(__name__)
JOIN_MARK: Final = "join "
"""Before the machine's name, in the identity of a connection that has proven a join token: no name has a space."""
MAX_MACHINES: Final = 16_384
MAX_JOIN_TOKENS: Final = 16_384
LOOK_S: Final = 1.0
MISSED_S: Final = 0.1
"""Between two looks into the store for tokens that are not known: what strangers can cause."""
RETIRED_S: Final = 24 * 3600
"""So long a machine whose job has ended may come to be told to go."""
MAX_RETIRED: Final = 4096
"""The one that was retired first makes room."""
PREFIX: Final = b"PK"
_MACHINES: Final = PREFIX + b"ma"
_JOIN_TOKENS: Final = PREFIX + b"jt"
_VERSION: Final = PREFIX + b"ve"
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
_Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_R = TypeVar("_R", bound=msgspec.Struct)


class MachineRow(msgspec.Struct, frozen=True, kw_only=True):
    name: _Name
    token_id: Annotated[str, msgspec.Meta(max_length=64)]
    key: _Key
    """`token_key` of its credential."""
    joined_s: int
    retired_s: int | None = None
    """When its job ended: it is let in to be told so, and for nothing else."""

    def __repr__(self) -> str:
        return f"MachineRow({self.name})"


class JoinToken(msgspec.Struct, frozen=True, kw_only=True):
    machine: _Name
    token_id: Annotated[str, msgspec.Meta(max_length=64)]
    key: _Key
    expires_s: int
    most: int = 0
    """Of a job of a batch system, which `machine` names: so many nodes join with it, each once, as NODE.JOB. 0: the
    machine of this name joins, and the token is used up."""

    def __repr__(self) -> str:
        return f"JoinToken({self.machine})"


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """From which a machine computes its credential; no secret."""

    machine: str
    token_id: str
    nonce: bytes


class _Version(msgspec.Struct, frozen=True):
    number: int


class Machines:
    """Lives in the loop of its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._version = -1
        self._by_name: dict[str, MachineRow] = {}
        self._by_token: dict[str, MachineRow] = {}
        self._joining: dict[str, JoinToken] = {}
        self._reading = asyncio.Lock()
        """Of two reads the later one counts."""
        self._next_look: asyncio.Task[None] | None = None
        """Has not begun to read, so it finds what was issued before now."""
        self._looked_s = -MISSED_S

    # --- what handshakes ask ---

    def find(self, token_id: str, now_s: int) -> UserKey | None:
        machine = self._by_token.get(token_id)
        if machine is not None:
            return UserKey(machine.name, machine.key)
        joining = self._joining.get(token_id)
        if joining is None or now_s >= joining.expires_s:
            return None
        return UserKey(JOIN_MARK + joining.machine, joining.key)

    async def find_now(self, token_id: str, now_s: int) -> UserKey | None:
        """As `find`, with what other managers have written before this call. Raises what the store raises."""
        found = self.find(token_id, now_s)
        if found is None:
            if self._next_look is None:
                self._next_look = asyncio.create_task(self._look())
            await asyncio.shield(self._next_look)
            found = self.find(token_id, now_s)
        return found

    async def _look(self) -> None:
        """One read of the store for all who miss a token before it begins, `MISSED_S` after the last one."""
        await asyncio.sleep(self._looked_s + MISSED_S - asyncio.get_running_loop().time())
        async with self._reading:
            self._looked_s = asyncio.get_running_loop().time()
            self._next_look = None
            await self._read()

    def key_of(self, name: str) -> bytes | None:
        """Of the credential; None for a machine that has not joined, or was revoked, or whose job has ended."""
        machine = self._by_name.get(name)
        return None if machine is None or machine.retired_s is not None else machine.key

    def is_retired(self, name: str) -> bool:
        """Whether it is a node of a job that has ended."""
        machine = self._by_name.get(name)
        return machine is not None and machine.retired_s is not None

    def names(self) -> list[str]:
        return sorted(name for name, machine in self._by_name.items() if machine.retired_s is None)

    # --- reading ---

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                await self.refresh()
            except TransientError as error:
                _log.warning("machines could not be read again reason=%s", error)
            await asyncio.sleep(LOOK_S)

    async def refresh(self) -> None:
        """Raises what the store raises, and `DataCorruption`."""
        async with self._reading:
            await self._read()

    async def _read(self) -> None:
        async def body(reader: Reader) -> tuple[int, list[MachineRow], list[JoinToken]] | None:
            raw = await reader.get(_VERSION)
            number = 0 if raw is None else decode_row(_VERSION, raw, _Version).number
            if number == self._version:
                return None
            return (
                number,
                await _all(reader, _MACHINES, MachineRow),
                await _all(reader, _JOIN_TOKENS, JoinToken),
            )

        found = await self._engine.read(body)
        if found is None:
            return
        self._version, machines, joining = found
        self._by_name = {machine.name: machine for machine in machines}
        self._by_token = {machine.token_id: machine for machine in machines}
        self._joining = {token.token_id: token for token in joining}

    # --- changes ---

    async def issue(self, name: str, now_s: int, lifetime_s: int, *, most: int = 0) -> str:
        """A join token; others of this machine are not valid any more. `most`: it is for so many nodes of a job.
        Raises `UsageError` over a limit."""
        token = f"{BEARER_MARK}.{secrets.token_hex(8)}.{secrets.token_urlsafe(32)}"
        row = convert(
            {
                "machine": name,
                "token_id": token_id_of(token),
                "key": token_key(token),
                "expires_s": now_s + lifetime_s,
                "most": most,
            },
            JoinToken,
        )

        async def body(rows: Transaction) -> None:
            waiting = await _all(rows, _JOIN_TOKENS, JoinToken)
            for other in waiting:
                if other.machine == name or other.expires_s <= now_s:
                    rows.clear(_JOIN_TOKENS + other.token_id.encode())
            if len(waiting) >= MAX_JOIN_TOKENS:
                raise UsageError(f"{MAX_JOIN_TOKENS} join tokens wait to be used; wait until some have expired")
            rows.set(_JOIN_TOKENS + row.token_id.encode(), encode_row(row))
            await _raise_version(rows)

        await self._engine.transact(body)
        await self.refresh()
        return token

    async def issue_for_job(self, job: str, nodes: int, lifetime_s: int) -> str:
        """A token that lets so many nodes of a job join."""
        return await self.issue(job, int(time.time()), lifetime_s, most=nodes)

    async def admit(self, token_id: str, named: str, now_s: int, node: str = "") -> Admission:
        """Uses the join token up, of which the caller has proven that it has it; `named` is whom it names. `node`: of
        the job that the token is of. Raises `PermissionDenied` where it is used, withdrawn or expired."""
        machine = slot_name(node, named) if node else named
        refused = PermissionDenied(f"the join token of {machine} is used, withdrawn or expired; make another one")
        admission = Admission(machine=machine, token_id=secrets.token_hex(8), nonce=secrets.token_bytes(NONCE_BYTES))

        async def body(rows: Transaction) -> None:
            key = _JOIN_TOKENS + token_id.encode()
            raw = await rows.get(key)
            token = None if raw is None else decode_row(key, raw, JoinToken)
            if token is None or token.machine != named or token.expires_s <= now_s or bool(node) != bool(token.most):
                raise refused
            there = await _all(rows, _MACHINES, MachineRow)
            of_job = [one.name for one in there if one.name.endswith(f".{named}")] if node else []
            if node and (machine in of_job or len(of_job) >= token.most):
                raise refused
            if sum(one.retired_s is None for one in there) >= MAX_MACHINES and all(
                one.name != machine for one in there
            ):
                raise UsageError(f"{MAX_MACHINES} machines have joined, the maximum; revoke some")
            credential = derive_credential(token.key, token_id=admission.token_id, nonce=admission.nonce)
            fields = {"name": machine, "token_id": admission.token_id, "key": token_key(credential)}
            row = convert({**fields, "joined_s": now_s}, MachineRow)
            if not node:
                rows.clear(key)
            rows.set(_MACHINES + machine.encode(), encode_row(row))
            await _raise_version(rows)

        await self._engine.transact(body)
        await self.refresh()
        return admission

    async def retire_jobs(self, living: Collection[str], now_s: int) -> None:
        """Nodes of jobs that are not among `living` are let in only to be told to go, for `RETIRED_S`; the tokens of
        these jobs let nobody join any more."""
        ended = {job for row in self._by_name.values() if row.retired_s is None and (job := node_of(row.name)[1])}
        ended.update(token.machine for token in self._joining.values() if token.most)
        ended.difference_update(living)
        if not ended and not forgotten(self._by_name.values(), now_s):
            return

        async def body(rows: Transaction) -> None:
            there: list[MachineRow] = []
            for machine in await _all(rows, _MACHINES, MachineRow):
                if machine.retired_s is None and node_of(machine.name)[1] in ended:
                    machine = msgspec.structs.replace(machine, retired_s=now_s)
                    rows.set(_MACHINES + machine.name.encode(), encode_row(machine))
                there.append(machine)
            for machine in forgotten(there, now_s):
                rows.clear(_MACHINES + machine.name.encode())
            for token in await _all(rows, _JOIN_TOKENS, JoinToken):
                if token.most and token.machine in ended:
                    rows.clear(_JOIN_TOKENS + token.token_id.encode())
            await _raise_version(rows)

        await self._engine.transact(body)
        await self.refresh()

    async def revoke(self, name: str) -> None:
        """From now on the machine is let in no more, and its join token is not valid. Raises `NotFound`."""

        async def body(rows: Transaction) -> None:
            key = _MACHINES + name.encode()
            tokens = [one for one in await _all(rows, _JOIN_TOKENS, JoinToken) if one.machine == name]
            if await rows.get(key) is None and not tokens:
                raise NotFound(f"no machine {name[:80]!r} has joined; `ff nodes` shows them")
            rows.clear(key)
            for token in tokens:
                rows.clear(_JOIN_TOKENS + token.token_id.encode())
            await _raise_version(rows)

        await self._engine.transact(body)
        try:
            await self.refresh()
        except FireflyerError as error:
            _log.warning("machines could not be read again reason=%s", error)


def of_another_store(key: bytes, value: bytes, more: int) -> bytes:
    """Value of a row of a backup for the store into which it is restored: the counter is `more` higher, so that who has
    read the lost store reads this one, too. Raises `DataCorruption`."""
    return encode_row(_Version(decode_row(key, value, _Version).number + more)) if key == _VERSION else value


def forgotten(machines: Collection[MachineRow], now_s: int) -> list[MachineRow]:
    """Machines of ended jobs that are not let in any more: pure."""
    retired = sorted((row.retired_s, row.name, row) for row in machines if row.retired_s is not None)
    most = len(retired) - MAX_RETIRED
    return [row for at, (retired_s, _, row) in enumerate(retired) if at < most or now_s - retired_s >= RETIRED_S]


async def _raise_version(rows: Transaction) -> None:
    raw = await rows.get(_VERSION)
    number = 0 if raw is None else decode_row(_VERSION, raw, _Version).number
    rows.set(_VERSION, encode_row(_Version(number + 1)))


async def _all(reader: Reader, prefix: bytes, row_type: type[_R]) -> list[_R]:
    begin, end = prefix_range(prefix)
    found: list[_R] = []
    while True:
        page = await reader.get_range(begin, end)
        found += [decode_row(key, value, row_type) for key, value in page.items]
        if not page.more:
            return found
        begin = page.items[-1][0] + b"\0"
