"""Brings the tables of the history to this release, once: managers that begin at the same time wait for each other.

Where there are none they are made as `schema` describes them, which takes a tenth of the time of the migrations.
Revisions are numbers of four digits. A manager whose release is older than the tables leaves them as they are:
migrations only add, so it can go on copying.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from sqlalchemy import Connection, inspect, text

from fireflyer.cluster.history.schema import METADATA, VERSION_TABLE

__all__ = ["HEAD", "MIGRATIONS", "found_revision", "migrate", "upgrade"]

HEAD: Final = "0003"
MIGRATIONS: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "migrations")


def found_revision(connection: Connection) -> str:
    """Empty where there are no tables."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return ""
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608
    return str(found or "")


def upgrade(connection: Connection) -> str:
    """In a transaction that holds the lock of the tables. The revision that they have then."""
    if not inspect(connection).has_table(VERSION_TABLE):
        _make(connection)
        return HEAD
    found = found_revision(connection)
    if found < HEAD:
        migrate(connection)
        return HEAD
    return found


def _make(connection: Connection) -> None:
    METADATA.create_all(connection, checkfirst=False)
    columns = f"version_num VARCHAR(32) NOT NULL, CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num)"
    connection.execute(text(f"CREATE TABLE {VERSION_TABLE} ({columns})"))
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES (:head)"), {"head": HEAD})  # noqa: S608


def migrate(connection: Connection) -> None:
    """From the revision that the tables have, or from none."""
    # Imported here: a manager whose tables need no migration begins without it.
    from alembic import command
    from alembic.config import Config

    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", MIGRATIONS.replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
