"""Routes of users, roles and tokens: for people. Any manager answers them: they change the store, not the leader's
memory."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import JSONBody, PathParameter, QueryParameter

from fireflyer.cluster.manager.users import Users
from fireflyer.cluster.manager.web.authentication import PEOPLE
from fireflyer.cluster.manager.web.routes import Who, address_of
from fireflyer.cluster.schema.api import MAX_PAGE, Commanded, KnownUser, NewToken, NewUser, ShownToken
from fireflyer.identity import TokenInfo

__all__ = ["ROUTES"]

_Name = Annotated[str, PathParameter(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
_Role = Annotated[str, PathParameter(pattern=r"^[a-z][a-z0-9-]{0,31}:[a-z][a-z0-9-]{0,31}$")]
_TokenId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{1,64}$")]
_Limit = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)]
_After = Annotated[str, QueryParameter(max_length=64)]


@get("/identity/users", opt={PEOPLE: True})
async def known(
    request: Who, known_users: NamedDependency[Users], after: _After = "", limit: _Limit = MAX_PAGE
) -> list[KnownUser]:
    """Users by name, those after `after`. For operators."""
    return await known_users.known(request.user, after, limit)


@post("/identity/users", status_code=201, opt={PEOPLE: True})
async def create(request: Who, data: JSONBody[NewUser], known_users: NamedDependency[Users]) -> KnownUser:
    """Add a user. For operators; with roles, for administrators."""
    return await known_users.create(request.user, data, address=address_of(request))


@delete("/identity/users/{name:str}", status_code=200, opt={PEOPLE: True})
async def remove(request: Who, name: _Name, known_users: NamedDependency[Users]) -> Commanded:
    """Remove a user and their tokens. For operators; of users with roles, for administrators."""
    return Commanded(await known_users.remove(request.user, name, address=address_of(request)))


@put("/identity/users/{name:str}/roles/{role:str}", opt={PEOPLE: True})
async def grant(request: Who, name: _Name, role: _Role, known_users: NamedDependency[Users]) -> Commanded:
    """Grant a role. For administrators."""
    return Commanded(await known_users.grant(request.user, name, role, address=address_of(request)))


@delete("/identity/users/{name:str}/roles/{role:str}", status_code=200, opt={PEOPLE: True})
async def revoke_role(request: Who, name: _Name, role: _Role, known_users: NamedDependency[Users]) -> Commanded:
    """Take a role back. For administrators."""
    return Commanded(await known_users.revoke_role(request.user, name, role, address=address_of(request)))


@get("/identity/users/{name:str}/tokens", opt={PEOPLE: True})
async def tokens(request: Who, name: _Name, known_users: NamedDependency[Users]) -> list[TokenInfo]:
    """Tokens of a user, without what makes them valid. For the user and operators."""
    return await known_users.tokens(request.user, name)


@post("/identity/users/{name:str}/tokens", status_code=201, opt={PEOPLE: True})
async def issue(request: Who, name: _Name, data: JSONBody[NewToken], known_users: NamedDependency[Users]) -> ShownToken:
    """A new token, shown this once. For the user and operators."""
    return await known_users.issue(request.user, name, data.lifetime_s, data.label, address=address_of(request))


@delete("/identity/users/{name:str}/tokens/{token_id:str}", status_code=200, opt={PEOPLE: True})
async def revoke(request: Who, name: _Name, token_id: _TokenId, known_users: NamedDependency[Users]) -> Commanded:
    """Revoke a token: the sessions that began with it end, too. For the user and operators."""
    return Commanded(await known_users.revoke(request.user, name, token_id, address=address_of(request)))


ROUTES: list[Any] = [known, create, remove, grant, revoke_role, tokens, issue, revoke]
