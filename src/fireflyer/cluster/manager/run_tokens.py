"""Tokens of runs: the processes of a run ask the API as the user of their task, as long as the run goes on.

A token is `fft1.run-TASK-NUMBER.SECRET`. The secret is a MAC, with a key that all managers of the cluster have, of the
run's token (which is never given twice) and of who the user was when the orders were made. So nothing of it is stored:
no store and no backup can lose, leak or keep it, any leader sends the same one, and whether it counts is what the rows
say at that moment. It is refused from the transaction on that ends the run, or tells it to stop, and once its user is
removed; somebody who gets the name later is another one. It carries no role of its user.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.platform.store.rows import RUNS, TASKS, RunRow, RunState
from fireflyer.cluster.manager.web.sessions import FoundToken, RunName
from fireflyer.identity import IdentityStore, UserInfo
from fireflyer.identity.handshake import BEARER_MARK, UserKey, token_id_of, token_key
from fireflyer.identity.users import refused_token
from fireflyer.kvstore import Engine, Reader

__all__ = ["RunTokens"]

_ID: Final = re.compile(r"run-([1-9][0-9]{0,15})-(0|[1-9][0-9]{0,8})")
_ALIVE: Final = (RunState.SCHEDULED, RunState.RUNNING)


class _Found(NamedTuple):
    run_token: str
    user: UserInfo


class RunTokens:
    def __init__(self, key: bytes, engine: Engine, users: IdentityStore) -> None:
        """`key`: 32 bytes that the managers of the cluster share."""
        self._key = hashlib.blake2b(b"fireflyer tokens of runs", key=key, digest_size=32).digest()
        self._engine = engine
        self._users = users

    async def issue(self, task: int, run: int, run_token: str, user: str) -> str:
        """The same whenever it is asked for; empty where there is no such user."""
        found = await self._users.user(user)
        return "" if found is None else self._token(RunName(task, run), run_token, found)

    async def verify(self, token: str) -> FoundToken | None:
        """None where it is no token of a run. Raises `PermissionDenied`, with the message of all refused tokens."""
        try:
            token_id = token_id_of(token)
        except UsageError:
            raise refused_token() from None
        if not self.is_of_run(token_id):
            return None
        name = _name(token_id)
        found = None if name is None else await self._find(name)
        if name is None or found is None:
            raise refused_token()
        right = self._token(name, found.run_token, found.user)
        if not hmac.compare_digest(token.encode(), right.encode()):
            raise refused_token()
        return _told(name, found)

    async def find(self, token_id: str) -> UserKey | None:
        """For handshakes of other services: the token counts there as long as it does here."""
        name = _name(token_id)
        found = None if name is None else await self._find(name)
        if name is None or found is None:
            return None
        account = found.user.account
        return UserKey(account.name, token_key(self._token(name, found.run_token, found.user)), account, scope="run")

    async def still(self, token_id: str) -> FoundToken | None:
        """Of a token that was verified: None once its run has ended."""
        name = _name(token_id)
        found = None if name is None else await self._find(name)
        return None if name is None or found is None else _told(name, found)

    @staticmethod
    def is_of_run(token_id: str) -> bool:
        """Those of the identity store are hexadecimal numbers."""
        return token_id.startswith("run-")

    async def _find(self, name: RunName) -> _Found | None:
        async def body(rows: Reader) -> tuple[bytes | None, bytes | None]:
            return await rows.get(RUNS.key_of(*name)), await rows.get(TASKS.key_of(name.task))

        run_row, task_row = await self._engine.read(body)
        if run_row is None or task_row is None:
            return None
        run = RUNS.decode(RUNS.key_of(*name), run_row)
        if not _counts(run):
            return None
        user = await self._users.user(TASKS.decode(TASKS.key_of(name.task), task_row).user)
        return None if user is None else _Found(run.token, user)

    def _token(self, name: RunName, run_token: str, user: UserInfo) -> str:
        who = (run_token, user.account.name, user.account.uid, user.created_s)
        secret = hmac.digest(self._key, msgspec.msgpack.encode(who), "sha256")
        text = base64.urlsafe_b64encode(secret).decode().rstrip("=")
        return f"{BEARER_MARK}.run-{name.task}-{name.number}.{text}"


def _counts(run: RunRow) -> bool:
    """One that is to suspend saves first, and may need it."""
    return run.state in _ALIVE and run.wanted != "stop"


def _name(token_id: str) -> RunName | None:
    found = _ID.fullmatch(token_id)
    return None if found is None else RunName(int(found[1]), int(found[2]))


def _told(name: RunName, found: _Found) -> FoundToken:
    return FoundToken(user=found.user.account.name, token_id=f"run-{name.task}-{name.number}", run=name)
