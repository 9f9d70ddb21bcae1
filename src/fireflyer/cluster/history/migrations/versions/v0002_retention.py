"""What was removed, what stays of it, and up to where the outbox was copied."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
_Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "usage_days",
        sa.Column("day_ns", _Number, autoincrement=False, nullable=False),
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("user_group", sa.Text(), nullable=False),
        sa.Column("runs", _Number, nullable=False),
        sa.Column("node_ns", _Number, nullable=False),
        sa.Column("productive_ns", _Number, nullable=False),
        sa.Column("tasks", _Number, nullable=False),
        sa.Column("succeeded", _Number, nullable=False),
        sa.Column("failed", _Number, nullable=False),
        sa.Column("stopped", _Number, nullable=False),
        sa.PrimaryKeyConstraint("day_ns", "user_name", "user_group"),
    )
    op.create_table(
        "removed",
        sa.Column("table_name", sa.Text(), nullable=False),
        sa.Column("until_ns", _Number, nullable=False),
        sa.Column("until_key", _Number, nullable=False),
        sa.Column("row_count", _Number, nullable=False),
        sa.PrimaryKeyConstraint("table_name"),
    )
    op.create_table(
        "copied",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("until", _Number, nullable=False),
        sa.PrimaryKeyConstraint("cluster"),
    )
    op.create_index("node_states_by_time", "node_states", ["at_ns"], unique=False)
