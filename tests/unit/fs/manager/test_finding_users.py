"""Whose token it is, for a process of the file system: its own store first, then those who are asked."""

from __future__ import annotations

import time

import pytest
from tests.support.loops import on_loop
from tests.support.network.known_users import known

from fireflyer.accounts import AccountStore
from fireflyer.accounts.serving import serve_accounts
from fireflyer.base.errors import PermissionDenied
from fireflyer.fs.schema.manager import GetStatus, RotateKeys
from fireflyer.fs.service.finding_users import finding_users
from fireflyer.fs.service.manager.process import check_role
from fireflyer.fs.service.rights import FS_ADMIN, is_administrator
from fireflyer.identity import Account, NodeCredential, Secret, UserKey
from fireflyer.identity.handshake import Accepts, token_id_of
from fireflyer.kvstore import MemoryEngine
from fireflyer.runtime.rpc import Caller, RpcServer

CREDENTIAL = NodeCredential(Secret(b"s" * 32), "manager 1")


@on_loop
async def test_names_make_administrators_of_users_in_the_store_alone_and_of_no_run() -> None:
    """Whoever may add users to the platform could take such a name there."""
    now_s = int(time.time())
    users = AccountStore(MemoryEngine())
    for name in ("admin", "ada"):
        await users.create_user(name, now_s)
    own, of_run = await users.issue("admin", now_s), await users.issue("admin", now_s, lifetime_s=60, scope="run")
    of_ada = await users.issue("ada", now_s)
    abroad = {
        "taken": UserKey("admin", b"k" * 32, Account("admin", 7, 7)),
        "granted": UserKey("bob", b"k" * 32, Account("bob", 8, 8), (FS_ADMIN,)),
    }
    server = RpcServer(Accepts(CREDENTIAL.secret))
    serve_accounts(server, known(abroad), CREDENTIAL.secret)
    address = await server.start("127.0.0.1", 0)
    roles = {}
    async with finding_users(users, ("admin",), (str(address),), CREDENTIAL) as find:
        for name in (token_id_of(own), token_id_of(of_run), token_id_of(of_ada), "taken", "granted"):
            user = await find(name)
            assert user is not None
            roles[name] = user.roles
        assert await find("nobody's") is None
    await server.close()
    assert list(roles.values()) == [(FS_ADMIN,), (), (), (), (FS_ADMIN,)]


def test_the_role_decides_who_is_an_administrator() -> None:
    admin = Caller("user", "ada", "", 1, roles=("platform:admin", FS_ADMIN))
    of_run = Caller("user", "admin", "", 2, scope="run")
    node = Caller("node", "storage 1", "", 3)
    assert [is_administrator(one) for one in (admin, of_run, node)] == [True, False, False]
    assert check_role(RotateKeys(), admin)
    assert not check_role(GetStatus(), of_run)
    with pytest.raises(
        PermissionDenied, match=r"the role fs:admin .* makes one, and the token of a run has no role"
    ) as no:
        check_role(RotateKeys(), of_run)
    assert "RotateKeys" not in str(no.value), "a name of the code, and of no command"
