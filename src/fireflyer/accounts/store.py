"""Users and tokens in the key-value store: each change one transaction, which may be tried again when nobody knows
whether it was committed.

`create_user` finds what an earlier attempt of the same call has made by a random number in the row; `issue` by the
number of the token, which is random too. `remove_user` removes only the user that its first attempt found, not
somebody who got the name since.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, TypeVar

import msgspec

from fireflyer.accounts.rows import (
    STATE_KEY,
    TOKENS,
    UIDS,
    USERS,
    StateRow,
    TokenRow,
    UidRow,
    UserRow,
    damaged,
    decode_named,
    end_of_owned,
    owned_key,
    owned_range,
    token_id_in,
    token_key,
    uid_in,
    uid_key,
    user_key,
)
from fireflyer.base.errors import Exists, UsageError
from fireflyer.identity import handshake
from fireflyer.identity.handshake import UserKey
from fireflyer.identity.users import (
    FIRST_UID,
    MAX_ID,
    MAX_ROLES,
    MAX_USERS,
    MAX_USERS_PER_PAGE,
    USER_SCOPE,
    Account,
    Identity,
    Scope,
    TokenInfo,
    UserInfo,
    check_ids,
    check_name,
    check_role,
    check_token_id,
    expiry_of,
    max_tokens,
    new_token,
    no_token,
    no_user,
    refused_token,
    token_id_or_refused,
    too_many,
    uid_taken,
    user_exists,
)
from fireflyer.kvstore import DEFAULT_TIMEOUT_NS, Engine, Reader, Transaction, key_after, prefix_range
from fireflyer.kvstore.core.rows import decode_row, encode_row

__all__ = ["AccountStore"]

T = TypeVar("T")
MAX_EXPIRED_PER_ISSUE: Final = 4
"""So many that have expired are cleared for each new one: they never add up, and no call takes long."""
_PAGE: Final = 1000
_NOBODY: Final = bytes(32)
_MAX_TOKEN_ID_CHARS: Final = 64


class AccountStore:
    """The `IdentityStore` in `engine`, which is the caller's to close. It has no state of its own, so there may be any
    number of them. Raises what the engine raises, and `DataCorruption` for rows that it did not write."""

    def __init__(self, engine: Engine, *, timeout_ns: int = DEFAULT_TIMEOUT_NS) -> None:
        self._engine = engine
        self._timeout_ns = timeout_ns

    # --- users ---

    async def create_user(
        self, name: str, now_s: int, *, uid: int | None = None, gid: int | None = None, groups: Sequence[int] = ()
    ) -> Account:
        check_name(name)
        check_ids(name, uid, gid, groups)
        nonce, sorted_groups = secrets.token_hex(8), tuple(sorted(set(groups)))

        async def body(rows: Transaction) -> Account:
            found = await _user(rows, name)
            if found is not None:
                if found.nonce == nonce:
                    return _account(found)
                raise user_exists(name)
            state = await _state(rows)
            if state.users >= MAX_USERS:
                raise UsageError(f"there are {MAX_USERS} users, the maximum; remove some")
            number, next_uid = uid, state.next_uid
            if number is None:
                number = await _free_uid(rows, next_uid)
                next_uid = min(number + 1, MAX_ID)
            elif (owner := await _owner(rows, number)) is not None:
                raise uid_taken(owner, number)
            user = UserRow(name, number, number if gid is None else gid, sorted_groups, (), now_s, nonce, 0, 0)
            rows.set(STATE_KEY, encode_row(StateRow(state.users + 1, next_uid)))
            rows.set(uid_key(number), encode_row(UidRow(name)))
            _put(rows, user)
            return _account(user)

        return await self._change(body)

    async def remove_user(self, name: str) -> None:
        first: list[str] = []

        async def body(rows: Transaction) -> None:
            user = await _user(rows, name)
            if user is None or (first and user.nonce != first[0]):
                if first:
                    return
                raise no_user(name)
            first[:] = [user.nonce]
            for token_id, key in await _owned(rows, name):
                rows.clear(token_key(token_id))
                rows.clear(key)
            state = await _state(rows)
            rows.set(STATE_KEY, encode_row(msgspec.structs.replace(state, users=max(state.users - 1, 0))))
            rows.clear(uid_key(user.uid))
            rows.clear(user_key(name))

        await self._change(body)

    async def user(self, name: str) -> UserInfo | None:
        user = await self._read(lambda rows: _user(rows, name))
        return None if user is None else _info(user)

    async def users(self, after: str = "", limit: int = MAX_USERS_PER_PAGE) -> list[UserInfo]:
        async def body(rows: Reader) -> list[UserInfo]:
            begin, found = key_after(user_key(after[:64])) if after else USERS, list[UserInfo]()
            left = min(limit, MAX_USERS_PER_PAGE)
            while left > 0:
                page = await rows.get_range(begin, prefix_range(USERS).end, limit=left)
                found += [_info(decode_named(key, row, UserRow, field="name", prefix=USERS)) for key, row in page.items]
                if not page.more:
                    break
                begin, left = key_after(page.items[-1][0]), left - len(page.items)
            return found

        return await self._read(body)

    # --- roles ---

    async def grant_role(self, name: str, role: str) -> None:
        check_role(role)

        async def body(rows: Transaction) -> None:
            user = await _known(rows, name)
            if role in user.roles:
                return
            if len(user.roles) >= MAX_ROLES:
                raise UsageError(f"user {name} has {MAX_ROLES} roles, the maximum; revoke some")
            _put(rows, msgspec.structs.replace(user, roles=tuple(sorted((*user.roles, role)))))

        await self._change(body)

    async def revoke_role(self, name: str, role: str) -> None:
        async def body(rows: Transaction) -> None:
            user = await _known(rows, name)
            if role in user.roles:
                _put(rows, msgspec.structs.replace(user, roles=tuple(one for one in user.roles if one != role)))

        await self._change(body)

    # --- tokens ---

    async def issue(
        self, user: str, now_s: int, *, lifetime_s: int | None = None, label: str = "", scope: Scope = "user"
    ) -> str:
        made = new_token()
        await self.add_token(user, now_s, made.id, made.key, lifetime_s=lifetime_s, label=label, scope=scope)
        return made.token

    async def add_token(
        self,
        user: str,
        now_s: int,
        token_id: str,
        key: bytes,
        *,
        lifetime_s: int | None = None,
        label: str = "",
        scope: Scope = "user",
    ) -> None:
        """Add a token that somebody else has made with `new_token`. The same one a second time changes nothing. Raises
        as `issue`, and `Exists` where another token has this number."""
        check_token_id(token_id)
        token = TokenRow(token_id, user, key, label, now_s, expiry_of(now_s, lifetime_s, label, scope), scope)

        async def body(rows: Transaction) -> None:
            owner = await _known(rows, user)
            if (there := await _token(rows, token_id)) is not None:
                if (there.user, there.sha256) == (user, token.sha256):
                    return
                raise Exists(f"there is another token with id {token_id}; make a new one")
            cleared = await _clear_expired(rows, user, scope, now_s)
            owner = _counted(owner, scope, -cleared)
            if (owner.tokens if scope == "user" else owner.run_tokens) >= max_tokens(scope):
                raise too_many(user, scope)
            rows.set(token_key(token_id), encode_row(token))
            rows.set(owned_key(token), b"")
            _put(rows, _counted(owner, scope, 1))

        await self._change(body)

    async def revoke(self, token_id: str) -> None:
        found = False

        async def body(rows: Transaction) -> None:
            nonlocal found
            token = await _token(rows, token_id)
            if token is None and not found:
                raise no_token(token_id)
            if token is not None:
                found = True
                rows.clear(token_key(token.id))
                rows.clear(owned_key(token))
                _put(rows, _counted(await _known(rows, token.user), token.scope, -1))

        await self._change(body)

    async def expire(self, token_id: str, expires_s: int) -> None:
        """The token counts no more from `expires_s` on. Raises `NotFound`, `UsageError` where it expires earlier."""

        async def body(rows: Transaction) -> None:
            token = await _token(rows, token_id)
            if token is None:
                raise no_token(token_id)
            if token.expires_s is not None and token.expires_s < expires_s:
                raise UsageError(f"token {token_id} expires earlier already; issue a new one instead")
            ends = msgspec.structs.replace(token, expires_s=expires_s)
            rows.clear(owned_key(token))
            rows.set(token_key(token_id), encode_row(ends))
            rows.set(owned_key(ends), b"")

        await self._change(body)

    async def tokens(self, user: str) -> list[TokenInfo]:
        async def body(rows: Reader) -> list[TokenRow]:
            await _known(rows, user)
            return [await _listed(rows, token_id, key) for token_id, key in await _owned(rows, user)]

        found = sorted(await self._read(body), key=lambda token: (token.created_s, token.id))
        return [
            TokenInfo(id=t.id, user=user, label=t.label, created_s=t.created_s, expires_s=t.expires_s, scope=t.scope)
            for t in found
        ]

    async def verify(self, token: str, now_s: int) -> Identity:
        token_id = token_id_or_refused(token)

        found, user = await self._token_and_user(token_id)
        right = hmac.compare_digest(handshake.token_key(token), found.sha256 if found is not None else _NOBODY)
        if found is None or user is None or not right or _expired(found, now_s):
            raise refused_token()
        return Identity(user.name, found.scope, user.roles if found.scope == "user" else (), found.id, found.label)

    async def find(self, token_id: str, now_s: int, scopes: Collection[Scope] = USER_SCOPE) -> UserKey | None:
        found, user = await self._token_and_user(token_id)
        if found is None or user is None or _expired(found, now_s) or found.scope not in scopes:
            return None
        return UserKey(
            user.name, found.sha256, _account(user), user.roles if found.scope == "user" else (), found.scope
        )

    async def _token_and_user(self, token_id: str) -> tuple[TokenRow | None, UserRow | None]:
        async def body(rows: Reader) -> tuple[TokenRow | None, UserRow | None]:
            found = await _token(rows, token_id)
            return found, None if found is None else await _user(rows, found.user)

        return await self._read(body)

    async def _change(self, body: Callable[[Transaction], Awaitable[T]]) -> T:
        return await self._engine.transact(body, timeout_ns=self._timeout_ns, idempotent=True)

    async def _read(self, body: Callable[[Reader], Awaitable[T]]) -> T:
        return await self._engine.read(body, timeout_ns=self._timeout_ns)


# --- rows ---


async def _state(rows: Reader) -> StateRow:
    value = await rows.get(STATE_KEY)
    return StateRow(0, FIRST_UID) if value is None else decode_row(STATE_KEY, value, StateRow)


async def _user(rows: Reader, name: str) -> UserRow | None:
    try:
        check_name(name)
    except UsageError:
        return None  # and no key that is too long
    value = await rows.get(user_key(name))
    return None if value is None else decode_named(user_key(name), value, UserRow, field="name", prefix=USERS)


async def _known(rows: Reader, name: str) -> UserRow:
    user = await _user(rows, name)
    if user is None:
        raise no_user(name)
    return user


async def _owner(rows: Reader, uid: int) -> str | None:
    value = await rows.get(uid_key(uid))
    return None if value is None else decode_row(uid_key(uid), value, UidRow).name


async def _free_uid(rows: Reader, uid: int) -> int:
    """The first from `uid` that nobody has. Raises `UsageError`."""
    begin, more = uid_key(uid), True
    while more:
        page = await rows.get_range(begin, prefix_range(UIDS).end, limit=_PAGE)
        for key, _ in page.items:
            if uid_in(key) != uid:
                return uid
            uid += 1
            begin = key_after(key)
        more = page.more
    if uid >= MAX_ID:
        raise UsageError(f"all uids up to {MAX_ID} were assigned; give one with --uid")
    return uid


async def _token(rows: Reader, token_id: str) -> TokenRow | None:
    if not 0 < len(token_id) <= _MAX_TOKEN_ID_CHARS or not token_id.isascii():
        return None
    value = await rows.get(token_key(token_id))
    return None if value is None else decode_named(token_key(token_id), value, TokenRow, field="id", prefix=TOKENS)


async def _listed(rows: Reader, token_id: str, key: bytes) -> TokenRow:
    token = await _token(rows, token_id)
    if token is None or owned_key(token) != key:
        raise damaged(key, "there is no such token")
    return token


async def _owned(rows: Reader, name: str) -> list[tuple[str, bytes]]:
    """Numbers of a user's tokens, and where they are listed."""
    wanted, found = owned_range(name), list[tuple[str, bytes]]()
    begin, more = wanted.begin, True
    while more:
        page = await rows.get_range(begin, wanted.end, limit=_PAGE)
        found += [(token_id_in(key, name), key) for key, _ in page.items]
        more = page.more
        begin = key_after(found[-1][1]) if found else begin
    return found


async def _clear_expired(rows: Transaction, name: str, scope: Scope, now_s: int) -> int:
    begin = owned_range(name, scope).begin
    page = await rows.get_range(begin, end_of_owned(name, scope, now_s), limit=MAX_EXPIRED_PER_ISSUE)
    for key, _ in page.items:
        rows.clear(token_key(token_id_in(key, name)))
        rows.clear(key)
    return len(page.items)


def _put(rows: Transaction, user: UserRow) -> None:
    rows.set(user_key(user.name), encode_row(user))


def _counted(user: UserRow, scope: Scope, change: int) -> UserRow:
    if scope == "user":
        return msgspec.structs.replace(user, tokens=max(user.tokens + change, 0))
    return msgspec.structs.replace(user, run_tokens=max(user.run_tokens + change, 0))


def _expired(token: TokenRow, now_s: int) -> bool:
    return token.expires_s is not None and now_s >= token.expires_s


def _account(user: UserRow) -> Account:
    return Account(user.name, user.uid, user.gid, user.groups)


def _info(user: UserRow) -> UserInfo:
    return UserInfo(_account(user), user.roles, user.created_s)
