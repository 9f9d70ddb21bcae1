"""The users in the key-value store are those that the file would have, and calls side by side lose nothing.

Mutants: each is the real code with one fault, which one of the two must find.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.accounts.histories import compared, problems_at_once

from fireflyer.accounts import AccountStore, rows, store
from fireflyer.base.errors import DataCorruption
from fireflyer.identity import Identity, tokens
from fireflyer.identity.users import Scope
from fireflyer.kvstore import Transaction

Patch = pytest.MonkeyPatch
HISTORY = 40
SEEDS = range(60)


@pytest.fixture(autouse=True)
def small_limits() -> Iterator[None]:
    """So that histories come to them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tokens, store):
            patch.setattr(module, "max_tokens", lambda scope: 2 if scope == "user" else 3)
            patch.setattr(module, "MAX_ROLES", 2)
            patch.setattr(module, "MAX_USERS", 3)
        patch.setattr(store, "_PAGE", 2)
        patch.setattr("os.fsync", lambda _fd: None)  # nothing crashes here
        yield


@pytest.fixture
def generous_limits(small_limits: None, monkeypatch: Patch) -> None:
    """Calls side by side may not fail by them."""
    monkeypatch.setattr(store, "max_tokens", lambda _scope: 50)
    monkeypatch.setattr(store, "MAX_ROLES", 32)
    monkeypatch.setattr(store, "MAX_USERS", 100)


def compared_with_a_file(rng: Random) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        return compared(f"{directory}/tokens.json", rng, HISTORY)


@given(st.integers(0, 2**32))
def test_one_call_after_the_other_has_the_same_outcome_as_with_the_file(seed: int) -> None:
    assert compared_with_a_file(Random(seed)) == []


@given(st.integers(0, 2**32))
@pytest.mark.usefixtures("generous_limits")
def test_calls_side_by_side_lose_nothing_although_commits_fail_or_stay_unknown(seed: int) -> None:
    assert problems_at_once(Random(seed), 6) == []


# --- faults ---


def tokens_outlive_their_user(patch: Patch) -> None:
    async def owned(*_: object) -> list[tuple[str, bytes]]:
        return []

    patch.setattr(store, "_owned", owned)


def a_token_is_valid_in_the_second_it_expires(patch: Patch) -> None:
    patch.setattr(store, "_expired", lambda token, now_s: token.expires_s is not None and now_s > token.expires_s)


def tokens_are_not_counted(patch: Patch) -> None:
    patch.setattr(store, "_counted", lambda user, _scope, _change: user)


def one_token_more_than_is_allowed(patch: Patch) -> None:
    patch.setattr(store, "max_tokens", lambda scope: 3 if scope == "user" else 4)


def uids_are_given_again(patch: Patch) -> None:
    original = store._free_uid

    async def free_uid(reader: Transaction, _uid: int) -> int:
        return await original(reader, 10_000)

    patch.setattr(store, "_free_uid", free_uid)


def a_uid_in_use_is_given(patch: Patch) -> None:
    async def free_uid(_reader: Transaction, uid: int) -> int:
        return uid

    patch.setattr(store, "_free_uid", free_uid)


def tokens_that_last_make_room(patch: Patch) -> None:
    patch.setattr(store, "end_of_owned", lambda name, scope, _now_s: rows.owned_range(name, scope).end)


def expired_tokens_keep_their_room(patch: Patch) -> None:
    async def clear_expired(*_: object) -> int:
        return 0

    patch.setattr(store, "_clear_expired", clear_expired)


def tokens_of_a_run_have_the_roles_of_their_user(patch: Patch) -> None:
    original = AccountStore.verify

    async def verify(self: AccountStore, token: str, now_s: int) -> Identity:
        found = await original(self, token, now_s)
        user = await self.user(found.user)
        return msgspec.structs.replace(found, roles=user.roles if user is not None else ())

    patch.setattr(AccountStore, "verify", verify)


def a_handshake_finds_tokens_of_every_scope(patch: Patch) -> None:
    original = AccountStore.find

    async def find(self: AccountStore, token_id: str, now_s: int, _scopes: tuple[Scope, ...] = ()) -> object:
        return await original(self, token_id, now_s, ("user", "run"))

    patch.setattr(AccountStore, "find", find)


def one_token_of_two_scopes_is_one_list(patch: Patch) -> None:
    original = rows.owned_range
    patch.setattr(store, "owned_range", lambda name, scope=None: original(name, None))
    patch.setattr(store, "end_of_owned", lambda name, _scope, _now_s: original(name, None).end)


def whoever_comes_second_gets_the_first_ones_account(patch: Patch) -> None:
    patch.setattr("secrets.token_hex", lambda _bytes: "0")


def users_are_read_without_conflicts(patch: Patch) -> None:
    original = store._user

    async def user(reader: Transaction, name: str) -> rows.UserRow | None:
        return await original(getattr(reader, "snapshot", reader), name)

    patch.setattr(store, "_user", user)


def numbers_of_the_cluster_are_read_without_conflicts(patch: Patch) -> None:
    original = store._state

    async def state(reader: Transaction) -> rows.StateRow:
        return await original(reader.snapshot)

    patch.setattr(store, "_state", state)


def a_repeated_call_does_not_know_what_it_did(patch: Patch) -> None:
    original = store._user

    async def user(reader: Transaction, name: str) -> rows.UserRow | None:
        found = await original(reader, name)
        return None if found is None else msgspec.structs.replace(found, nonce="another")

    patch.setattr(store, "_user", user)


SEQUENTIAL: tuple[Callable[[Patch], None], ...] = (
    tokens_outlive_their_user,
    a_token_is_valid_in_the_second_it_expires,
    tokens_are_not_counted,
    one_token_more_than_is_allowed,
    uids_are_given_again,
    a_uid_in_use_is_given,
    tokens_that_last_make_room,
    expired_tokens_keep_their_room,
    tokens_of_a_run_have_the_roles_of_their_user,
    a_handshake_finds_tokens_of_every_scope,
    one_token_of_two_scopes_is_one_list,
    whoever_comes_second_gets_the_first_ones_account,
)
AT_ONCE: tuple[Callable[[Patch], None], ...] = (
    users_are_read_without_conflicts,
    numbers_of_the_cluster_are_read_without_conflicts,
    a_repeated_call_does_not_know_what_it_did,
)


def found_by(check: Callable[[Random], list[str]]) -> bool:
    for seed in SEEDS:
        try:
            if check(Random(seed)):
                return True
        except DataCorruption:
            return True
    return False


@pytest.mark.parametrize("mutant", SEQUENTIAL, ids=lambda mutant: mutant.__name__)
def test_a_fault_in_one_call_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    assert found_by(compared_with_a_file)


@pytest.mark.parametrize("mutant", AT_ONCE, ids=lambda mutant: mutant.__name__)
@pytest.mark.usefixtures("generous_limits")
def test_a_fault_between_calls_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    assert found_by(lambda rng: problems_at_once(rng, 6))
