"""How Alembic runs the migrations: on the connection that `upgrade` holds, in its transaction."""

from alembic import context

from fireflyer.cluster.history.schema import METADATA, VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, version_table=VERSION_TABLE
)
context.run_migrations()
