"""Answers to numbered requests: told again, forgotten when the client has them, and never done twice."""

from __future__ import annotations

import errno

import pytest
from tests.support.loops import on_loop

from fireflyer.base.errors import DataCorruption, PermissionDenied
from fireflyer.fs.core.meta.open_rows import CLIENT_ROWS, CLIENTS, ClientRow
from fireflyer.fs.core.meta.replies import (
    STEP,
    SessionEnded,
    SessionForgotten,
    admit,
    forget_client,
    number_allowed,
    store_answer,
)
from fireflyer.fs.core.meta.tables import number_key
from fireflyer.fs.core.rows import SESSIONS, SessionRow
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.meta import MAX_NUMBERS, Answer, Done, ErrorReply
from fireflyer.kvstore import Engine, MemoryEngine, Transaction
from fireflyer.kvstore.core.rows import encode_row


async def _open_session(kv: Engine, client: int, user: str = "ada") -> None:
    async def body(tx: Transaction) -> None:
        tx.set(SESSIONS.key(client), encode_row(SessionRow(client, user, f"nonce {client}")))

    await kv.transact(body)


async def _end_session(kv: Engine, client: int) -> None:
    async def body(tx: Transaction) -> None:
        tx.clear(SESSIONS.key(client))

    await kv.transact(body)


async def _enrol(kv: Engine, client: int, user: str, *, evicted: bool = False) -> None:
    async def body(tx: Transaction) -> None:
        tx.set(number_key(CLIENTS, client), CLIENT_ROWS.encode(ClientRow(0, user, evicted=evicted)))

    await kv.transact(body)


async def _ask(
    kv: Engine, client: int, number: int, answer: Answer, *, done_below: int = 1, user: str = "ada"
) -> tuple[Answer, bool]:
    """The answer, and whether it was carried out now."""

    async def body(tx: Transaction) -> tuple[Answer, bool]:
        stored = await admit(tx, client, user, number)
        if stored is not None:
            return stored, False
        await store_answer(tx, client, number, done_below, answer)
        return answer, True

    return await kv.transact(body)


async def _rows(kv: Engine) -> int:
    return len((await kv.read(lambda tx: tx.get_range(b"FR", b"FS"))).items)


@on_loop
async def test_a_request_that_comes_again_is_answered_as_the_first_time() -> None:
    async with MemoryEngine() as kv:
        await _open_session(kv, 7)
        assert await _ask(kv, 7, 1, ErrorReply(errno.EEXIST, "it is there")) == (
            ErrorReply(errno.EEXIST, "it is there"),
            True,
        )
        assert await _ask(kv, 7, 1, Done()) == (ErrorReply(errno.EEXIST, "it is there"), False)
        assert await _ask(kv, 7, 2, Done()) == (Done(), True)


@on_loop
async def test_answers_are_forgotten_when_the_client_has_them_and_stragglers_are_refused() -> None:
    async with MemoryEngine() as kv:
        await _open_session(kv, 7)
        for number in range(1, 4 * STEP):
            await _ask(kv, 7, number, Done(), done_below=number)
        assert await _rows(kv) <= STEP + 2
        with pytest.raises(FileError) as refused:
            await _ask(kv, 7, 1, Done())
        assert refused.value.errno == errno.EINVAL
        assert (await _ask(kv, 7, 4 * STEP - 1, ErrorReply(1, "")))[0] == Done()


@on_loop
async def test_a_client_that_keeps_to_no_rule_stores_no_more_rows_by_it() -> None:
    async with MemoryEngine() as kv:
        await _open_session(kv, 7)
        for number in range(1, 60_000, 139):
            for done_below in (number - MAX_NUMBERS + 1, number):
                if done_below >= 0 and number_allowed(number, done_below):
                    try:
                        await _ask(kv, 7, number, Done(), done_below=done_below)
                    except FileError:
                        pass
        assert await _rows(kv) <= MAX_NUMBERS + STEP + 1


def test_the_window_of_numbers() -> None:
    assert [number_allowed(number, 10) for number in (9, 10, 9 + MAX_NUMBERS, 10 + MAX_NUMBERS)] == [
        False,
        True,
        True,
        False,
    ]


@on_loop
async def test_a_session_that_is_over_changes_nothing_but_a_service_is_told_what_it_had_done() -> None:
    async with MemoryEngine() as kv:
        await _open_session(kv, 7, user="")
        await _enrol(kv, 7, "")
        await _ask(kv, 7, 1, Done(), user="")
        await _end_session(kv, 7)
        assert await _ask(kv, 7, 1, ErrorReply(1, ""), user="") == (Done(), False)
        with pytest.raises(SessionEnded):
            await _ask(kv, 7, 2, Done(), user="")

        async def forget(tx: Transaction) -> None:
            forget_client(tx, 7)

        await kv.transact(forget)
        assert await _rows(kv) == 0


@on_loop
async def test_nobody_uses_or_sees_the_session_of_another_user() -> None:
    async with MemoryEngine() as kv:
        await _open_session(kv, 7)
        await _ask(kv, 7, 1, Done())
        for number in (1, 2):
            with pytest.raises(PermissionDenied, match="belongs to another user"):
                await _ask(kv, 7, number, Done(), user="mallory")
        await _enrol(kv, 7, "ada")
        await _end_session(kv, 7)
        for number in (1, 2):
            with pytest.raises(PermissionDenied, match="belongs to another user"):
                await _ask(kv, 7, number, Done(), user="mallory")


@on_loop
async def test_after_the_end_a_user_is_told_what_was_done_until_nobody_knows() -> None:
    async with MemoryEngine() as kv:
        await _open_session(kv, 7)
        await _enrol(kv, 7, "ada")
        await _ask(kv, 7, 1, Done())
        await _end_session(kv, 7)
        assert await _ask(kv, 7, 1, ErrorReply(1, "")) == (Done(), False)
        with pytest.raises(SessionEnded) as over:
            await _ask(kv, 7, 2, Done())
        assert not isinstance(over.value, SessionForgotten)

        async def forget(tx: Transaction) -> None:
            forget_client(tx, 7)
            tx.clear(number_key(CLIENTS, 7))

        await kv.transact(forget)
        with pytest.raises(SessionForgotten):
            await _ask(kv, 7, 1, Done())


@on_loop
async def test_nothing_is_done_for_a_client_that_was_evicted() -> None:
    async with MemoryEngine() as kv:
        await _open_session(kv, 7)
        await _enrol(kv, 7, "ada")
        await _ask(kv, 7, 1, Done())
        await _enrol(kv, 7, "ada", evicted=True)
        assert await _ask(kv, 7, 1, ErrorReply(1, "")) == (Done(), False)
        with pytest.raises(SessionEnded):
            await _ask(kv, 7, 2, Done())


@on_loop
async def test_a_damaged_row_is_told() -> None:
    async with MemoryEngine() as kv:
        await _open_session(kv, 7)
        await _ask(kv, 7, 1, Done())

        async def damage(tx: Transaction) -> None:
            for key, _ in (await tx.get_range(b"FR", b"FS")).items:
                tx.set(key, b"\x01\xc1")

        await kv.transact(damage)
        with pytest.raises(DataCorruption):
            await _ask(kv, 7, 1, Done())
