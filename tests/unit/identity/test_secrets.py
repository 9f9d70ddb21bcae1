"""A node secret is 32 bytes that do not show, in a file that only its owner can read."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest

from fireflyer.base.errors import DataCorruption, NotFound, PermissionDenied, UsageError
from fireflyer.identity.secrets import Secret, load_secret, new_secret, save_secret


def test_a_saved_secret_is_loaded_and_private(tmp_path: Path) -> None:
    path = str(tmp_path / "secret")
    secret = new_secret()
    old = os.umask(0)
    try:
        save_secret(secret, path)
    finally:
        os.umask(old)
    assert load_secret(path) == secret
    assert load_secret(path) != new_secret()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(tmp_path) == ["secret"]


def test_saving_replaces_the_old_secret(tmp_path: Path) -> None:
    path = str(tmp_path / "secret")
    save_secret(new_secret(), path)
    second = new_secret()
    save_secret(second, path)
    assert load_secret(path) == second
    assert os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o610])
def test_a_file_that_others_may_touch_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = str(tmp_path / "secret")
    save_secret(new_secret(), path)
    os.chmod(path, mode)
    with pytest.raises(PermissionDenied, match=f"chmod 600 {path}") as caught:
        load_secret(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 31, 33, 5000])
def test_a_file_of_another_length_is_damaged(tmp_path: Path, length: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(length))
    path.chmod(0o600)
    with pytest.raises(DataCorruption, match=str(path)) as caught:
        load_secret(str(path))
    assert length > 4096 or "make one: (umask 077; head -c 32 " in str(caught.value)


def test_what_is_not_a_file_is_refused_without_hanging(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        load_secret(str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="not a regular file"):
        load_secret(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="not a regular file"):
        load_secret(str(tmp_path / "pipe"))


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError):
        save_secret(new_secret(), str(tmp_path / "taken"))
    assert os.listdir(tmp_path) == ["taken"]
    with pytest.raises(NotFound):
        save_secret(new_secret(), str(tmp_path / "no" / "secret"))


def test_a_secret_does_not_show_and_is_not_pickled() -> None:
    secret = Secret(b"0123456789abcdef" * 2)
    assert "0123" not in f"{secret!r} {secret} {[secret]}"
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(secret)
    with pytest.raises(UsageError, match="32 bytes"):
        Secret(b"short")
