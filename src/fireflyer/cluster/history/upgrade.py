"""Brings the tables of the history to this release, once: managers that begin at the same time wait for each other.

Revisions are numbers of four digits. A manager whose release is older than the tables leaves them as they are:
migrations only add, so it can go on copying.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from sqlalchemy import Connection, inspect, text

from fireflyer.cluster.history.schema import VERSION_TABLE

__all__ = ["HEAD", "MIGRATIONS", "found_revision", "upgrade"]

HEAD: Final = "0002"
MIGRATIONS: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "migrations")


def found_revision(connection: Connection) -> str:
    """Empty where there are no tables."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return ""
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608
    return str(found or "")


def upgrade(connection: Connection) -> str:
    """In a transaction that holds the lock of the tables. The revision that they have then."""
    found = found_revision(connection)
    if found >= HEAD:
        return found
    # Imported here: a manager whose tables are there already begins without it.
    from alembic import command
    from alembic.config import Config

    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", MIGRATIONS.replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    return HEAD
