"""A service that tells others, which have the node secret, whose token it is."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Final

from fireflyer.accounts.calls import FIND_TOKEN, FindToken, FoundToken, sealed
from fireflyer.base.errors import PermissionDenied
from fireflyer.base.units import MIB
from fireflyer.identity.handshake import NONCE_BYTES, Accepts, FindUser
from fireflyer.identity.secrets import Secret, load_secret
from fireflyer.runtime.address import Address, parse_listen
from fireflyer.runtime.rpc.server import Caller, RpcServer, ServerLimits

__all__ = ["serve_accounts", "serving_accounts"]

_LIMITS: Final = ServerLimits(connections=4096, request_bytes_per_connection=MIB, frame_bytes=MIB)


def serve_accounts(server: RpcServer, find_user: FindUser | None, secret: Secret) -> None:
    """With `server`, which has this node secret. None: no token counts for anything."""

    async def find(request: FindToken, caller: Caller) -> FoundToken:
        if caller.role != "node":
            raise PermissionDenied("only services, authenticated with the node secret, may ask for tokens")
        user = None if find_user is None else await find_user(request.token_id)
        return FoundToken(None if user is None else sealed(user, secret, secrets.token_bytes(NONCE_BYTES)))

    server.register(FIND_TOKEN, find)


@contextlib.asynccontextmanager
async def serving_accounts(listen: str, secret_file: str, name: str, find_user: FindUser) -> AsyncIterator[None]:
    """On a port of its own, for services of another component. `listen`: host:port; empty: nowhere. Raises
    `FireflyerError` where it cannot listen, or the file has no secret."""
    if not listen:
        yield
        return
    secret = load_secret(secret_file)
    server = RpcServer(Accepts(secret), identity=name, limits=_LIMITS)
    serve_accounts(server, find_user, secret)
    address = Address(*parse_listen(listen))
    try:
        await server.start(address.host, address.port)
        yield
    finally:
        await server.close()
