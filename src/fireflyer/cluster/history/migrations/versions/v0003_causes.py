"""Why runs left, when they had saved, and which fault moved a node: what failures are attributed by."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
_Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("runs", sa.Column("wish", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("saved_ns", _Number, nullable=True))
    op.create_index("runs_by_change", "runs", ["cluster", "change"], unique=False)
    op.add_column("node_states", sa.Column("fault", sa.Text(), nullable=True))
    op.add_column("node_states", sa.Column("ticket", _Number, nullable=True))
