"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
_Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("entry", sa.Text(), nullable=False),
        sa.Column("at_ns", _Number, nullable=False),
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("entry"),
    )
    op.create_index("audit_by_time", "audit", ["at_ns", "entry"], unique=False)
    op.create_table(
        "node_states",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("change", _Number, autoincrement=False, nullable=False),
        sa.Column("at_ns", _Number, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "change"),
    )
    op.create_index("node_states_by_node", "node_states", ["node", "at_ns"], unique=False)
    op.create_table(
        "run_parts",
        sa.Column("task", _Number, autoincrement=False, nullable=False),
        sa.Column("run", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("part", sa.Text(), nullable=False),
        sa.Column("ns", _Number, nullable=False),
        sa.PrimaryKeyConstraint("task", "run", "part"),
    )
    op.create_table(
        "runs",
        sa.Column("task", _Number, autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("change", _Number, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("node_names", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("leave_reason", sa.Text(), nullable=False),
        sa.Column("scheduled_ns", _Number, nullable=False),
        sa.Column("prepared_ns", _Number, nullable=True),
        sa.Column("started_ns", _Number, nullable=True),
        sa.Column("ended_ns", _Number, nullable=True),
        sa.Column("over_ns", _Number, nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.Column("productive_ns", _Number, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("task", "number"),
    )
    op.create_index("runs_by_end", "runs", ["ended_ns"], unique=False)
    op.create_index("runs_by_over", "runs", ["over_ns"], unique=False)
    op.create_table(
        "tasks",
        sa.Column("id", _Number, autoincrement=False, nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("change", _Number, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("user_group", sa.Text(), nullable=False),
        sa.Column("node_group", sa.Text(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("submission", _Number, nullable=False),
        sa.Column("array_index", sa.Integer(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("submitted_ns", _Number, nullable=False),
        sa.Column("since_ns", _Number, nullable=False),
        sa.Column("ended_ns", _Number, nullable=True),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.Column("requeues", sa.Integer(), nullable=False),
        sa.Column("whole_life", _Number, nullable=False),
        sa.Column("queue_ns", _Number, server_default="0", nullable=False),
        sa.Column("suspended_ns", _Number, server_default="0", nullable=False),
        sa.Column("platform_ns", _Number, server_default="0", nullable=False),
        sa.Column("release_ns", _Number, server_default="0", nullable=False),
        sa.Column("start_ns", _Number, server_default="0", nullable=False),
        sa.Column("productive_ns", _Number, server_default="0", nullable=False),
        sa.Column("checkpoint_ns", _Number, server_default="0", nullable=False),
        sa.Column("lost_ns", _Number, server_default="0", nullable=False),
        sa.Column("restart_ns", _Number, server_default="0", nullable=False),
        sa.Column("other_ns", _Number, server_default="0", nullable=False),
        sa.Column("unknown_ns", _Number, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("tasks_by_end", "tasks", ["ended_ns", "id"], unique=False)
    op.create_index("tasks_by_user", "tasks", ["user_name", "ended_ns"], unique=False)
    op.create_table(
        "totals",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("change", _Number, autoincrement=False, nullable=False),
        sa.Column("at_ns", _Number, nullable=False),
        sa.Column("node_ns", _Number, nullable=False),
        sa.Column("healthy_ns", _Number, nullable=False),
        sa.Column("allocated_ns", _Number, nullable=False),
        sa.Column("productive_ns", _Number, nullable=False),
        sa.PrimaryKeyConstraint("cluster", "change"),
    )
    op.create_index("totals_by_time", "totals", ["at_ns"], unique=False)
