"""Users and tokens of a file (`identity.TokenStore`), which earlier releases kept, brought into the key-value store.

A manager does this before it answers anybody:

    read the file ──> rows (pure) ──> one transaction, if there never were users in the store ──> rename the file

The transaction writes everything and `FNim`, or nothing. Where a manager dies before the commit, the file is as it was
and the next start begins again. Where it dies after it, the next start finds `FNim` with the digest of the file, and
only renames. Of several managers that start at once the first to commit wins: the others find users there. A file that
somebody changes with an older release in the meantime has another digest; it stays, and the log says so.

The renamed file is read where the store has never had users: a store that was made anew, or put back from a backup
that is older than the import, or that of another component with the same file. It is a copy: where it is damaged, or
others may read it, the log says so and the manager starts.

A file of another digest beside a store with users is left over, or was changed by an older release; nobody in it can
enter. Where it has users that the store does not know, the manager does not start: they would be refused one by one.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import time
from collections import Counter
from typing import Final

from fireflyer.accounts.rows import (
    IMPORT_KEY,
    MAX_SECONDS,
    STATE_KEY,
    USERS,
    ImportRow,
    StateRow,
    TokenRow,
    UidRow,
    UserRow,
    owned_key,
    token_key,
    uid_key,
    user_key,
)
from fireflyer.base.errors import DataCorruption, Exists, FireflyerError, PermissionDenied, UsageError
from fireflyer.identity.private_files import lock_file, rename_private_file
from fireflyer.identity.tokens import FileContent, TokenStore
from fireflyer.identity.users import (
    MAX_USERS,
    check_label,
    check_name,
    check_role,
    check_token_id,
    max_tokens,
    too_many,
    uid_taken,
)
from fireflyer.kvstore import DEFAULT_TIMEOUT_NS, MAX_TRANSACTION_BYTES, Engine, Reader, Transaction
from fireflyer.kvstore.core.keys import ENTRY_OVERHEAD_BYTES, MAX_ENTRIES, key_after, prefix_range
from fireflyer.kvstore.core.rows import decode_row, encode_row

__all__ = ["IMPORTED_SUFFIX", "import_users", "rows_of"]

_log = logging.getLogger(__name__)
IMPORTED_SUFFIX: Final = ".imported"
_SPARE_BYTES: Final = 64 * 1024
"""Of a transaction, for what it reads."""
_SPARE_ENTRIES: Final = 16
_PAGE: Final = 1000
"""Users, read at once."""
_SHOWN: Final = 5
"""Names, in a message."""


class _Outcome(enum.Enum):
    IMPORTED = enum.auto()
    AGAIN = enum.auto()
    """This file was imported before."""
    OTHERS = enum.auto()
    """The store has or had users that are not from this file."""


async def import_users(engine: Engine, path: str) -> None:
    """`path`: of the file; nothing happens where it is empty, or there is no such file. Raises `DataCorruption` for a
    file that no release has written, `UsageError` for one that is too large for a transaction or that has users whom
    a store with users does not know, `PermissionDenied` where others may read it, and what the engine raises."""
    if not path:
        return
    now_s = int(time.time())
    source = path if await asyncio.to_thread(os.path.exists, path) else path + IMPORTED_SUFFIX
    try:
        content = await asyncio.to_thread(TokenStore(source).content)
        if content is None:
            return
        made = rows_of(source, content, now_s)
    except (DataCorruption, PermissionDenied, UsageError) as error:
        if source == path:
            raise
        _log.warning("%s; it is a copy of what was imported, and not read", error.message)
        return
    outcome = await _commit(engine, content, made)
    if outcome is _Outcome.IMPORTED:
        _log.info("%d users of %s are in the key-value store now", len(content.users), source)
    if source != path:
        return
    if outcome is _Outcome.OTHERS:
        await _check_known(engine, path, content)
        _log.warning(
            "%s is not read: the key-value store has users already; change them with `ff fs admin user` or `ff user`, "
            "and remove the file",
            path,
        )
        return
    await asyncio.to_thread(_retire, path, content)


async def _check_known(engine: Engine, path: str, content: FileContent) -> None:
    """Raises `UsageError` where users of the file are not in the store."""

    async def known(rows: Reader) -> set[bytes]:
        keys: set[bytes] = set()
        begin, more = USERS, True
        while more:
            page = await rows.get_range(begin, prefix_range(USERS).end, limit=_PAGE)
            keys.update(key for key, _ in page.items)
            begin, more = key_after(page.items[-1][0]) if page.items else begin, page.more
        return keys

    keys = await engine.read(known, timeout_ns=DEFAULT_TIMEOUT_NS)
    found = [one.account.name for one in content.users if user_key(one.account.name) not in keys]
    if found:
        shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        raise UsageError(
            f"tokens_file {path} has users whom the key-value store of this manager does not know: {shown}. It is read "
            "only where the store never had users; add them with `ff fs admin user add`, then remove the file or the "
            "setting"
        )


async def _commit(engine: Engine, content: FileContent, made: dict[bytes, bytes]) -> _Outcome:
    async def known(rows: Reader) -> _Outcome | None:
        value = await rows.get(IMPORT_KEY)
        if value is not None and decode_row(IMPORT_KEY, value, ImportRow).digest == content.digest:
            return _Outcome.AGAIN
        return None if await rows.get(STATE_KEY) is None else _Outcome.OTHERS

    if (before := await engine.read(known, timeout_ns=DEFAULT_TIMEOUT_NS)) is not None:
        return before

    async def body(rows: Transaction) -> _Outcome:
        if (found := await known(rows)) is not None:
            return found
        for key, value in made.items():
            rows.set(key, value)
        return _Outcome.IMPORTED

    return await engine.transact(body, timeout_ns=DEFAULT_TIMEOUT_NS, idempotent=True)


def _retire(path: str, content: FileContent) -> None:
    """Rename it, unless somebody has changed it since. Not being able to do so is no reason not to serve."""
    try:
        with lock_file(path + ".lock"):
            now = TokenStore(path).content()
            if now is None:
                return
            if now.digest != content.digest:
                _log.warning("%s was changed while it was imported; what was changed does not count", path)
                return
            rename_private_file(path, path + IMPORTED_SUFFIX)
    except FireflyerError as error:
        _log.warning("%s; its users are in the key-value store now: remove the file", error)


# --- pure ---


def rows_of(path: str, content: FileContent, now_s: int) -> dict[bytes, bytes]:
    """All rows, without tokens that have expired. Raises `DataCorruption`, `UsageError` (too large). `path`: for the
    messages."""
    try:
        _check(content)
    except (UsageError, Exists) as error:
        raise DataCorruption(f"token file {path} is damaged: {error.message}; restore it from a backup") from None
    live = [(one, key) for one, key in content.tokens if one.expires_s is None or now_s < one.expires_s]
    counts = Counter((one.user, one.scope) for one, _ in live)
    rows = {
        STATE_KEY: encode_row(StateRow(len(content.users), content.next_uid)),
        IMPORT_KEY: encode_row(ImportRow(content.digest, now_s)),
    }
    nonce = content.digest[:8].hex()
    for user in content.users:
        one = user.account
        of_user, of_runs = counts[one.name, "user"], counts[one.name, "run"]
        row = UserRow(one.name, one.uid, one.gid, one.groups, user.roles, user.created_s, nonce, of_user, of_runs)
        rows[user_key(one.name)] = encode_row(row)
        rows[uid_key(one.uid)] = encode_row(UidRow(one.name))
    for token, key in live:
        kept = TokenRow(token.id, token.user, key, token.label, token.created_s, token.expires_s, token.scope)
        rows[token_key(token.id)] = encode_row(kept)
        rows[owned_key(kept)] = b""
    size = sum(len(key) + len(value) + ENTRY_OVERHEAD_BYTES for key, value in rows.items())
    if size > MAX_TRANSACTION_BYTES - _SPARE_BYTES or len(rows) > MAX_ENTRIES - _SPARE_ENTRIES:
        raise UsageError(
            f"token file {path} has {len(content.users)} users and {len(live)} tokens, {size} bytes in {len(rows)} "
            f"rows, and one transaction takes {MAX_TRANSACTION_BYTES} bytes and {MAX_ENTRIES} rows; revoke unused "
            "tokens with the release that wrote the file"
        )
    return rows


def _check(content: FileContent) -> None:
    """Raises `UsageError` for what none of the two stores would have taken."""
    if len(content.users) > MAX_USERS:
        raise UsageError(f"{len(content.users)} users; at most {MAX_USERS} are allowed")
    uids: dict[int, str] = {}
    for user in content.users:
        account = user.account
        check_name(account.name)
        if account.uid in uids:
            raise uid_taken(uids[account.uid], account.uid)
        uids[account.uid] = account.name
        for role in user.roles:
            check_role(role)
        _check_time(user.created_s)
    seen = set[str]()
    for token, _ in content.tokens:
        check_token_id(token.id)
        if token.id in seen:
            raise UsageError(f"there are two tokens with id {token.id}")
        seen.add(token.id)
        check_label(token.label)
        _check_time(token.created_s)
        _check_time(token.expires_s or 0)
    for (name, scope), count in Counter((one.user, one.scope) for one, _ in content.tokens).items():
        if count > max_tokens(scope):
            raise too_many(name, scope)


def _check_time(time_s: int) -> None:
    if not 0 <= time_s <= MAX_SECONDS:
        raise UsageError(f"time {time_s}; 0 to {MAX_SECONDS} are allowed")
