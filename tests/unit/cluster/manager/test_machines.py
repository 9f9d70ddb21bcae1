"""Machines that join: a token buys one credential, once, whichever manager is asked."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest

from fireflyer.base.errors import NotFound, PermissionDenied
from fireflyer.cluster.core.platform.orders import GONE, orders_of_retired
from fireflyer.cluster.manager import machines
from fireflyer.cluster.manager.machines import (
    JOIN_MARK,
    PREFIX,
    RETIRED_S,
    Admission,
    MachineRow,
    Machines,
    forgotten,
    of_another_store,
)
from fireflyer.cluster.schema.sync import Inventory, Sync
from fireflyer.identity.derived import derive_credential
from fireflyer.identity.handshake import token_id_of, token_key
from fireflyer.kvstore import MemoryEngine, MemoryStore, Reader, Transaction, prefix_range

T = TypeVar("T")
NOW, LIFETIME_S = 1_700_000_000, 60


def on_managers(test: Callable[[Machines, Machines], Awaitable[None]]) -> None:
    """Two managers over one store."""

    async def main() -> None:
        store = MemoryStore()
        one, other = MemoryEngine(store), MemoryEngine(store)
        await test(Machines(one), Machines(other))

    asyncio.run(main())


class CountedReads(MemoryEngine):
    reads = 0

    async def read(self, body: Callable[[Reader], Awaitable[T]], *args: Any, **options: Any) -> T:
        self.reads += 1
        return await super().read(body, *args, **options)


def credential_of(token: str, admission: Admission) -> str:
    """As the machine computes it."""
    return derive_credential(token_key(token), token_id=admission.token_id, nonce=admission.nonce)


async def joined(machines: Machines, name: str = "gpu-1") -> str:
    token = await machines.issue(name, NOW, LIFETIME_S)
    return credential_of(token, await machines.admit(token_id_of(token), name, NOW))


def test_the_credential_that_a_token_buys_is_let_in_by_all_managers() -> None:
    async def test(one: Machines, other: Machines) -> None:
        credential = await joined(one)
        await other.refresh()
        for manager in (one, other):
            found = manager.find(token_id_of(credential), NOW)
            assert found is not None
            assert (found.user, found.key) == ("gpu-1", token_key(credential))
            assert manager.key_of("gpu-1") == token_key(credential)

    on_managers(test)


def test_the_manager_that_a_machine_asks_need_not_be_the_one_that_made_its_token() -> None:
    async def test(one: Machines, other: Machines) -> None:
        await other.refresh()
        token = token_id_of(await one.issue("gpu-1", NOW, LIFETIME_S))
        assert other.find(token, NOW) is None, "it has not read the store since"
        found = await other.find_now(token, NOW)
        assert found is not None
        assert found.user == f"{JOIN_MARK}gpu-1"
        credential = await joined(one, "gpu-2")
        assert await other.find_now(token_id_of(credential), NOW) is not None, "nor where it joined"
        await one.revoke("gpu-2")
        assert await one.find_now(token_id_of(credential), NOW) is None

    on_managers(test)


def test_strangers_cause_few_reads_of_the_store() -> None:
    async def main() -> None:
        engine = CountedReads(MemoryStore())
        one = Machines(engine)
        asked = [one.find_now(f"{number:016x}", NOW) for number in range(200)]
        assert await asyncio.gather(*asked) == [None] * 200
        assert engine.reads == 1
        token = await one.issue("gpu-1", NOW, LIFETIME_S)
        reads = engine.reads
        assert await one.find_now(token_id_of(token), NOW) is not None
        assert engine.reads == reads, "what is known is not looked up"

    asyncio.run(main())


def test_who_has_read_the_lost_store_reads_the_restored_one() -> None:
    async def main() -> None:
        backup, lost, restored = MemoryStore(), MemoryStore(), MemoryStore()
        rows: list[tuple[bytes, bytes]] = []

        async def take(reader: Reader) -> None:
            rows[:] = (await reader.get_range(*prefix_range(PREFIX))).items

        await joined(Machines(MemoryEngine(backup)))
        await MemoryEngine(backup).read(take)

        async def load(transaction: Transaction, more: int) -> None:
            for key, value in rows:
                transaction.set(key, of_another_store(key, value, more))

        for store, more in ((lost, 0), (restored, 1000)):
            await MemoryEngine(store).transact(functools.partial(load, more=more))
        await Machines(MemoryEngine(lost)).issue("gpu-2", NOW, LIFETIME_S)
        running = Machines(MemoryEngine(lost))
        await running.refresh()
        token = await Machines(MemoryEngine(restored)).issue("gpu-3", NOW, LIFETIME_S)
        running._engine = MemoryEngine(restored)
        assert await running.find_now(token_id_of(token), NOW) is not None

    asyncio.run(main())


def test_a_join_token_proves_no_machine() -> None:
    async def test(one: Machines, _: Machines) -> None:
        token = await one.issue("gpu-1", NOW, LIFETIME_S)
        found = one.find(token_id_of(token), NOW)
        assert found is not None
        assert found.user == f"{JOIN_MARK}gpu-1"
        assert one.key_of("gpu-1") is None

    on_managers(test)


def test_of_many_who_use_a_token_at_once_one_wins() -> None:
    async def test(one: Machines, other: Machines) -> None:
        token = await one.issue("gpu-1", NOW, LIFETIME_S)
        tries = [manager.admit(token_id_of(token), "gpu-1", NOW) for manager in (one, other) * 4]
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(result, Admission) for result in results) == 1
        assert sum(isinstance(result, PermissionDenied) for result in results) == 7

    on_managers(test)


def test_a_token_is_for_one_machine_and_a_while() -> None:
    async def test(one: Machines, _: Machines) -> None:
        token = await one.issue("gpu-1", NOW, LIFETIME_S)
        with pytest.raises(PermissionDenied):
            await one.admit(token_id_of(token), "gpu-2", NOW)
        with pytest.raises(PermissionDenied):
            await one.admit(token_id_of(token), "gpu-1", NOW + LIFETIME_S)
        assert one.find(token_id_of(token), NOW + LIFETIME_S) is None

    on_managers(test)


def test_a_new_token_makes_the_old_one_of_the_machine_invalid() -> None:
    async def test(one: Machines, _: Machines) -> None:
        first = await one.issue("gpu-1", NOW, LIFETIME_S)
        await one.issue("gpu-2", NOW, LIFETIME_S)
        second = await one.issue("gpu-1", NOW, LIFETIME_S)
        with pytest.raises(PermissionDenied):
            await one.admit(token_id_of(first), "gpu-1", NOW)
        await one.admit(token_id_of(second), "gpu-1", NOW)

    on_managers(test)


def test_a_revoked_machine_is_out_on_all_managers() -> None:
    async def test(one: Machines, other: Machines) -> None:
        credential = await joined(one)
        await other.refresh()
        await one.revoke("gpu-1")
        await other.refresh()
        assert [manager.find(token_id_of(credential), NOW) for manager in (one, other)] == [None, None]
        assert one.names() == []
        with pytest.raises(NotFound):
            await one.revoke("gpu-1")

    on_managers(test)


def test_a_machine_that_joins_again_has_one_credential() -> None:
    async def test(one: Machines, _: Machines) -> None:
        first, second = await joined(one), await joined(one)
        assert one.find(token_id_of(first), NOW) is None
        assert one.find(token_id_of(second), NOW) is not None
        assert one.names() == ["gpu-1"]

    on_managers(test)


@pytest.mark.parametrize("name", ["", "a b", "../x", "join gpu", "x" * 81, "<script>"])
def test_names_that_are_none_are_refused(name: str) -> None:
    async def test(one: Machines, _: Machines) -> None:
        with pytest.raises(msgspec.ValidationError):
            await one.issue(name, NOW, LIFETIME_S)

    on_managers(test)


def test_a_node_of_a_job_that_ended_is_let_in_to_be_told_to_go_and_for_nothing_else() -> None:
    async def test(one: Machines, other: Machines) -> None:
        tokens = {job: await one.issue(job, NOW, LIFETIME_S, most=2) for job in ("t1-0", "t2-0")}
        names = {}
        for job, token in tokens.items():
            admission = await one.admit(token_id_of(token), job, NOW, "gpu-1")
            names[job] = admission.machine, credential_of(token, admission)
        own = await joined(one, "gpu-9")
        await one.retire_jobs(["t2-0"], NOW)
        await other.refresh()
        for manager in (one, other):
            name, credential = names["t1-0"]
            assert manager.find(token_id_of(credential), NOW) is not None
            assert (manager.is_retired(name), manager.key_of(name)) == (True, None)
            living, _ = names["t2-0"]
            assert not manager.is_retired(living)
            assert manager.key_of(living) is not None
            assert manager.names() == sorted([living, "gpu-9"])
            assert manager.key_of("gpu-9") == token_key(own)
            assert not manager.is_retired("nobody")
        with pytest.raises(PermissionDenied):
            await one.admit(token_id_of(tokens["t1-0"]), "t1-0", NOW, "gpu-2")
        await one.retire_jobs(["t2-0"], NOW + RETIRED_S - 1)
        assert one.is_retired(names["t1-0"][0])
        await one.retire_jobs(["t2-0"], NOW + RETIRED_S)
        assert not one.is_retired(names["t1-0"][0])
        assert one.find(token_id_of(names["t1-0"][1]), NOW) is None

    on_managers(test)


def test_of_retired_machines_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MAX_RETIRED", 2)
    rows = [
        MachineRow(name=f"n{at}", token_id="0", key=b"k" * 32, joined_s=0, retired_s=None if at == 3 else at)
        for at in range(5)
    ]
    assert [row.name for row in forgotten(rows, 10)] == ["n0", "n1"]
    assert [row.name for row in forgotten(rows, 2 + RETIRED_S)] == ["n0", "n1", "n2"]


def test_who_is_told_to_go_follows_it_whichever_manager_says_it() -> None:
    inventory = Inventory(address="a", port=1, version="1", boot_id="b", hostname="h", cores=1, memory_bytes=1)
    orders = orders_of_retired(Sync(incarnation=1, sequence=1, heard=7, term=3, inventory=inventory), ("m:1",))
    assert (orders.term, orders.version, orders.runs, orders.leave) == (3, 8, (), GONE)
