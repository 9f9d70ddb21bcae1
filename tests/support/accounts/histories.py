"""Random histories of an `IdentityStore`: one call after the other beside the file, and many calls at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import nullcontext, suppress
from functools import partial
from random import Random
from typing import Any, Final

from tests.support.kvstore.engines import at_once

from fireflyer.accounts import AccountStore, rows
from fireflyer.base.errors import FireflyerError, NotFound
from fireflyer.identity import TokenStore
from fireflyer.identity.handshake import token_id_of
from fireflyer.identity.users import Scope
from fireflyer.kvstore import CommitFault, KeyRange, MemoryEngine, MemoryStore, SteppedTiming, steps
from fireflyer.kvstore.core.rows import decode_row

__all__ = ["compared", "problems_at_once", "problems_in"]

NAMES: Final = ("ada", "adam", "grace", "alan")
ROLES: Final = ("fs:admin", "platform:operator", "platform:admin")
LIFETIMES_S: Final = (None, 1, 3, 9, 30, 30)
FAULTS: Final = (*[CommitFault.NONE] * 6, *CommitFault)
BOTH: Final[tuple[Scope, ...]] = ("user", "run")


def engine_of(rng: Random, faults: Callable[[], CommitFault] = lambda: CommitFault.NONE) -> MemoryEngine:
    now_ns = 0

    def tick() -> int:
        nonlocal now_ns
        now_ns += 1000
        return now_ns

    return MemoryEngine(MemoryStore(), waits=SteppedTiming(tick, rng.randrange), faults=faults)


# --- one call after the other ---


class Twins:
    """The same calls to the file and to the key-value store, and what differs in their outcomes."""

    def __init__(self, path: str, rng: Random) -> None:
        self._rng = rng
        self._file = TokenStore(path)
        self._engine = engine_of(rng)
        self._store = AccountStore(self._engine)
        self._tokens: list[tuple[str, str, int | None]] = []
        """Of the file, of the key-value store, and when both expire."""
        self._now_s = 1000

    def step(self) -> list[str]:
        self._now_s += self._rng.randrange(3)
        call = self._rng.choice((self._create, self._create, self._remove, self._role, self._issue, self._issue,
            self._issue, self._revoke, self._verify, self._verify, self._list))  # fmt: skip
        return [*call(), *problems_in(self._engine.store)]

    def _both(self, name: str, *arguments: Any, **options: Any) -> tuple[list[str], Any, Any]:
        def outcome(work: Callable[[], Any]) -> Any:
            try:
                return work()
            except FireflyerError as error:
                return type(error), error.message

        first = outcome(lambda: getattr(self._file, name)(*arguments, **options))
        second = outcome(lambda: at_once(lambda: getattr(self._store, name)(*arguments, **options)))
        same = first == second or (name == "issue" and isinstance(first, str) and isinstance(second, str))
        return ([] if same else [f"{name}{arguments} {options}: {first}, and {second}"]), first, second

    def _name(self) -> str:
        return self._rng.choice(NAMES)

    def _create(self) -> list[str]:
        uid = self._rng.choice((None, None, 10_000 + self._rng.randrange(6)))
        groups = tuple(self._rng.randrange(4) for _ in range(self._rng.randrange(3)))
        return self._both("create_user", self._name(), self._now_s, uid=uid, groups=groups)[0]

    def _remove(self) -> list[str]:
        return self._both("remove_user", self._name())[0] if self._rng.random() < 0.5 else []

    def _role(self) -> list[str]:
        return self._both(self._rng.choice(("grant_role", "revoke_role")), self._name(), self._rng.choice(ROLES))[0]

    def _issue(self) -> list[str]:
        lifetime_s, scope = self._rng.choice(LIFETIMES_S), self._rng.choice(BOTH)
        told, first, second = self._both("issue", self._name(), self._now_s, lifetime_s=lifetime_s, scope=scope)
        if isinstance(first, str) and isinstance(second, str):
            self._tokens.append((first, second, None if lifetime_s is None else self._now_s + lifetime_s))
        return told

    def _revoke(self) -> list[str]:
        if not self._tokens or self._rng.random() < 0.5:
            return []
        first, second, expires_s = self._tokens.pop(self._rng.randrange(len(self._tokens)))
        if expires_s is not None and expires_s <= self._now_s:
            return []  # a store may have cleared it, or not yet
        return self._pair(
            partial(self._file.revoke, token_id_of(first)), partial(self._store.revoke, token_id_of(second))
        )

    def _verify(self) -> list[str]:
        found = []
        for first, second, _ in self._tokens:
            found += self._pair(
                partial(self._file.verify, first, self._now_s), partial(self._store.verify, second, self._now_s)
            )
            for scopes in (BOTH[:1], BOTH):
                in_file = self._file.find(token_id_of(first), self._now_s, scopes)
                in_store = at_once(partial(self._store.find, token_id_of(second), self._now_s, scopes))
                if (in_file is None) != (in_store is None):
                    found.append(f"find {scopes}: {in_file}, and {in_store}")
        return found

    def _pair(self, first: Callable[[], Any], second: Callable[[], Awaitable[Any]]) -> list[str]:
        outcomes = []
        for work in (first, lambda: at_once(second)):
            try:
                outcomes.append(_shown(work()))
            except FireflyerError as error:
                outcomes.append((type(error),))
        return [] if outcomes[0] == outcomes[1] else [f"{outcomes[0]}, and {outcomes[1]}"]

    def _list(self) -> list[str]:
        users = at_once(self._store.users)
        expected = [self._file.user(name) for name in self._file.users()]
        found = [] if users == expected else [f"users {expected}, and {users}"]
        for name in self._file.users():
            valid = [
                sorted(
                    (info.label, info.created_s, str(info.expires_s), info.scope)
                    for info in infos
                    if info.expires_s is None or info.expires_s > self._now_s
                )
                for infos in (self._file.tokens(name), at_once(partial(self._store.tokens, name)))
            ]
            if valid[0] != valid[1]:
                found.append(f"tokens of {name}: {valid[0]}, and {valid[1]}")
        return found


def _shown(outcome: Any) -> Any:
    """Without the number of a token, which is random."""
    return (outcome.user, outcome.scope, outcome.roles) if hasattr(outcome, "roles") else outcome


def compared(path: str, rng: Random, length: int) -> list[str]:
    """The first differences of a history of so many calls; none if the stores agree."""
    twins = Twins(path, rng)
    for _ in range(length):
        if found := twins.step():
            return found
    return []


# --- many calls at a time ---


def problems_at_once(rng: Random, length: int) -> list[str]:
    """Calls side by side on a store whose commits fail, or stay unknown: what was promised and does not hold."""
    engine = engine_of(rng)
    store = AccountStore(engine)
    for name in NAMES[:3]:
        at_once(partial(store.create_user, name, 0))
    engine._faults = lambda: rng.choice(FAULTS)
    issued: list[tuple[str, str]] = []
    granted: list[tuple[str, str]] = []
    revoked: list[str] = []
    removed = "grace" if rng.random() < 0.5 else ""
    found: list[str] = []

    async def issue(name: str) -> None:
        with suppress(NotFound) if name == removed else nullcontext():
            token = await store.issue(name, 1, lifetime_s=100, scope=rng.choice(BOTH))
            issued.append((name, token))
            if rng.random() < 0.3:
                await store.revoke(token_id_of(token))
                revoked.append(token)

    async def grant(name: str, role: str) -> None:
        await store.grant_role(name, role)
        granted.append((name, role))

    async def create(name: str) -> None:
        account = await store.create_user(name, 1)
        found.extend([] if account.name == name else [f"{account} instead of {name}"])

    works: list[Callable[[], Awaitable[None]]] = [partial(create, f"new{number}") for number in range(3)]
    works += [partial(store.remove_user, removed)] if removed else []
    for _ in range(length):
        works.append(partial(issue, rng.choice(NAMES[:3])))
        works.append(partial(grant, rng.choice(NAMES[:2]), rng.choice(ROLES)))
    found += _side_by_side(rng, works)
    engine._faults = lambda: CommitFault.NONE
    for name, token in issued:
        valid = _accepted(store, token)
        if valid != (token not in revoked and name != removed):
            found.append(f"a token of {name} is {'accepted' if valid else 'refused'}")
    for name, role in granted:
        user = at_once(partial(store.user, name))
        if user is None or role not in user.roles:
            found.append(f"role {role} of {name} is lost")
    names = {user.account.name for user in at_once(store.users)}
    expected = {*NAMES[:3], "new0", "new1", "new2"} - {removed}
    return [*found, *([] if names == expected else [f"users {names}"]), *problems_in(engine.store)]


def _side_by_side(rng: Random, works: list[Callable[[], Awaitable[None]]]) -> list[str]:
    running: list[Generator[Any, Any, Any]] = [steps(work) for work in works]
    found = []
    while running:
        one = rng.choice(running)
        try:
            next(one)
        except StopIteration:
            running.remove(one)
        except FireflyerError as error:
            running.remove(one)
            found.append(f"{type(error).__name__}: {error.message}")
    return found


def _accepted(store: AccountStore, token: str) -> bool:
    try:
        at_once(lambda: store.verify(token, 2))
    except FireflyerError:
        return False
    return True


# --- what always holds ---


def problems_in(store: MemoryStore) -> list[str]:
    """Rows that contradict each other."""
    items = dict(store.scan(store.version, KeyRange(b"", None)).items)
    users = {k: decode_row(k, v, rows.UserRow) for k, v in items.items() if k.startswith(rows.USERS)}
    tokens = [decode_row(k, v, rows.TokenRow) for k, v in items.items() if k.startswith(rows.TOKENS)]
    uids = {k: decode_row(k, v, rows.UidRow) for k, v in items.items() if k.startswith(rows.UIDS)}
    found = []
    state = items.get(rows.STATE_KEY)
    count = decode_row(rows.STATE_KEY, state, rows.StateRow).users if state is not None else 0
    if count != len(users):
        found.append(f"{count} users are counted, and there are {len(users)}")
    if {rows.uid_key(user.uid): user.name for user in users.values()} != {k: row.name for k, row in uids.items()}:
        found.append(f"uids {uids} are not those of {users}")
    if {rows.owned_key(token) for token in tokens} != {key for key in items if key.startswith(rows.OWNED)}:
        found.append("the tokens that are listed are not those that there are")
    for user in users.values():
        counted = (user.tokens, user.run_tokens)
        there = tuple(sum(t.user == user.name and t.scope == scope for t in tokens) for scope in BOTH)
        if counted != there:
            found.append(f"{counted} tokens of {user.name} are counted, and there are {there}")
    owners = {user.name for user in users.values()}
    return found + [f"a token of {token.user}, who does not exist" for token in tokens if token.user not in owners]
