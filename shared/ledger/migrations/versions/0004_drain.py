"""Whether a paused run's trainer trains what is complete: so the scheduler can say again which pause it is.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("drain", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.execute(
        "UPDATE runs SET drain = false WHERE state = 'paused' AND reason LIKE 'alert %'"
    )  # those paused by themselves


def downgrade() -> None:
    raise NotImplementedError("the ledger is a record: migrations go forward only; restore a backup instead")
