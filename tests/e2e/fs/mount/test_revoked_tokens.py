"""A token that is revoked: within seconds what is open with it is refused, in clients and mounts; others go on."""

from __future__ import annotations

import errno
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.mounts.mounting import mounted, needs_fuse
from tests.support.jobs.launching import wait_until
from tests.support.patience import allowed_s

import fireflyer.fs
from fireflyer.base.errors import PermissionDenied
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.client.local import access_of
from fireflyer.identity.handshake import token_id_of
from fireflyer.identity.private_files import write_private_file

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

CLOSED_S: Final = 10.0
"""After a token is revoked, as the command says."""


def target_of(cluster: LocalCluster) -> str:
    """Without the secrets of the directory: tokens say who it is."""
    return "ff://" + ",".join(access_of(str(cluster.directory))[0])


def with_token(cluster: LocalCluster) -> tuple[str, str]:
    """A user and their token."""
    name = f"user-{secrets.token_hex(4)}"
    return name, cluster.ff("admin", "user", "add", name, "--token").strip()


def revoke(cluster: LocalCluster, name: str, token: str, refused: Callable[[], bool]) -> None:
    """Returns when it is `refused`, at most `CLOSED_S` after the end of the command."""
    said = cluster.ff("admin", "user", "revoke-token", name, token_id_of(token))
    assert said == f"Token {token_id_of(token)} of {name} is revoked.\n"
    wait_until(refused, allowed_s(CLOSED_S), "what is open goes on")


def is_refused(files: FileSystem) -> bool:
    try:
        files.stat("/")
    except PermissionDenied:
        return True
    return False


def test_the_open_client_of_a_revoked_token_is_refused_and_that_of_another_user_goes_on(
    shared_cluster: LocalCluster,
) -> None:
    cluster, target = shared_cluster, target_of(shared_cluster)
    ada, token = with_token(cluster)
    _, other = with_token(cluster)
    path = f"/read-by-all-{secrets.token_hex(4)}"
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as root, root.open(path, "wb", permissions=0o644) as file:
        file.write(b"text")
    with fireflyer.fs.connect(target, token=token) as hers, fireflyer.fs.connect(target, token=other) as his:
        with his.open(path, "rb") as file:
            assert hers.stat(path).st_size == 4

            def refused() -> bool:
                assert his.stat(path).st_size == 4, "nobody else notices"
                return is_refused(hers)

            revoke(cluster, ada, token, refused)
            assert file.read() == b"text"
        assert his.stat(path).st_size == 4
    with pytest.raises(PermissionDenied, match="unknown, revoked or expired"):
        fireflyer.fs.connect(target, token=token).close()


@needs_fuse
def test_a_mount_with_a_revoked_token_is_refused(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    name, token = with_token(shared_cluster)
    token_file, place = tmp_path / "token", tmp_path / "place"
    write_private_file(str(token_file), token.encode())
    place.mkdir()
    managers = [word for one in access_of(str(shared_cluster.directory))[0] for word in ("--manager", one)]
    command = [sys.executable, "-P", "-m", "fireflyer", "fs", "mount", str(place)]
    with mounted([*command, *managers, "--token-file", str(token_file)], str(place)) as mount:
        here = Path(mount.path)
        assert not (here / "nothing").exists()

        def refused() -> bool:
            try:
                (here / f"nothing-{secrets.token_hex(4)}").stat()
            except FileNotFoundError:
                return False
            except OSError as error:
                return error.errno == errno.EACCES
            raise AssertionError("a file that nobody made is there")

        revoke(shared_cluster, name, token, refused)
