"""The databases of the history that tests go through."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.kvstore.postgres import PostgresServer


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.processes)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'history.sqlite'}"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.url().replace("&table=", "&schema=h_")
