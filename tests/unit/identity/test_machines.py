"""Join tokens and credentials of machines, on the side that lets them join."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

import pytest

from fireflyer.base.errors import DataCorruption, FireflyerError, NotFound, PermissionDenied, UsageError
from fireflyer.identity.derived import derive_credential, seal, unseal
from fireflyer.identity.handshake import token_id_of, token_key
from fireflyer.identity.machines import Bought, MachineStore
from fireflyer.identity.secrets import Secret

NOW_S: Final = 1_000_000


def redeem(store: MachineStore, token: str, machine: str, now_s: int = NOW_S) -> Bought:
    return store.redeem(token_id_of(token), machine=machine, address="10.0.0.2", port=29440, now_s=now_s)


def test_both_ends_compute_the_same_credential_which_is_not_the_token(tmp_path: Path) -> None:
    store = MachineStore(str(tmp_path / "machines"))
    token = store.issue("gpu-1", NOW_S, 600)
    bought = redeem(store, token, "gpu-1")
    theirs = derive_credential(token_key(token), token_id=bought.token_id, nonce=bought.nonce)
    machine = store.machines()["gpu-1"]
    assert machine.credential == theirs
    assert (machine.address, machine.port, machine.joined_s) == ("10.0.0.2", 29440, NOW_S)
    assert token.split(".")[2] not in theirs
    assert theirs not in repr(machine)
    for name in os.listdir(tmp_path / "machines"):
        assert (tmp_path / "machines" / name).stat().st_mode & 0o077 == 0


def test_a_join_token_is_valid_once_though_many_use_it_at_the_same_time(tmp_path: Path) -> None:
    token = MachineStore(str(tmp_path / "m")).issue("a", NOW_S, 600)
    won: list[Bought] = []
    refused: list[FireflyerError] = []
    begin = threading.Barrier(8)

    def use() -> None:
        store = MachineStore(str(tmp_path / "m"))
        begin.wait()
        try:
            won.append(redeem(store, token, "a"))
        except PermissionDenied as error:
            refused.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)


def test_a_join_token_expires_and_only_its_machine_has_it(tmp_path: Path) -> None:
    store = MachineStore(str(tmp_path / "m"))
    token = store.issue("a", NOW_S, 600)
    with pytest.raises(PermissionDenied, match="used, withdrawn or expired"):
        redeem(store, token, "b")
    assert store.find(token_id_of(token), NOW_S + 599) is not None
    assert store.find(token_id_of(token), NOW_S + 600) is None
    with pytest.raises(PermissionDenied, match="used, withdrawn or expired"):
        redeem(store, token, "a", NOW_S + 600)
    assert store.machines() == {}


def test_a_new_join_token_of_a_machine_makes_the_former_one_invalid(tmp_path: Path) -> None:
    store = MachineStore(str(tmp_path / "m"))
    former, token = store.issue("a", NOW_S, 600), store.issue("a", NOW_S, 600)
    with pytest.raises(PermissionDenied):
        redeem(store, former, "a")
    redeem(store, token, "a")


def test_a_machine_that_joins_again_has_another_credential_and_a_revoked_one_has_none(tmp_path: Path) -> None:
    store = MachineStore(str(tmp_path / "m"))
    redeem(store, store.issue("a", NOW_S, 600), "a")
    former = store.machines()["a"].credential
    redeem(store, store.issue("a", NOW_S, 600), "a")
    now = store.machines()["a"].credential
    assert token_id_of(now) != token_id_of(former)
    token = store.issue("a", NOW_S, 600)
    assert store.revoke("a").credential == now
    assert store.machines() == {}
    with pytest.raises(PermissionDenied):  # a token that was made before is withdrawn with it
        redeem(store, token, "a")
    with pytest.raises(NotFound, match="no machine 'a' has joined"):
        store.revoke("a")


@pytest.mark.parametrize("name", ["", "10.0.0.1", "a b", "a/../b", "x" * 65])
def test_a_bad_name_is_one_clear_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"^machine name .* must be 1 to 64 letters"):
        MachineStore(str(tmp_path / "m")).issue(name, NOW_S, 600)


def test_a_damaged_file_and_one_that_others_may_read_are_refused(tmp_path: Path) -> None:
    store = MachineStore(str(tmp_path / "m"))
    path = tmp_path / "m" / "machines.json"
    path.write_bytes(b'{"version": 1, "machines": [' + b"[" * 2000)
    path.chmod(0o600)
    with pytest.raises(DataCorruption, match="is damaged"):
        store.machines()
    path.chmod(0o644)
    with pytest.raises(PermissionDenied, match="can be read by other users"):
        store.machines()
    (tmp_path / "m").chmod(0o777)
    with pytest.raises(PermissionDenied, match="can be written by other users"):
        MachineStore(str(tmp_path / "m"))


def test_a_sealed_secret_is_opened_with_the_credential_and_nonce_of_its_seal_alone() -> None:
    secret, nonce = Secret(bytes(range(32))), b"n" * 32
    sealed = seal(secret, b"key of one", nonce)
    assert sealed != secret.reveal()
    assert unseal(sealed, b"key of one", nonce) == secret
    assert unseal(sealed, b"key of other", nonce) != secret
    assert unseal(sealed, b"key of one", b"m" * 32) != secret
    with pytest.raises(DataCorruption, match="32 bytes"):
        unseal(sealed[:31], b"key of one", nonce)
    with pytest.raises(DataCorruption, match="nonce"):
        unseal(sealed, b"key of one", b"short")
