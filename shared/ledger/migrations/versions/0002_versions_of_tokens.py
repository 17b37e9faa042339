"""The newest version of an attempt's tokens, and all that a group's may have: after a fork the oldest is not the farthest.

Revision ID: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("newest_version", sa.BigInteger(), nullable=True))
    op.execute("ALTER TABLE groups RENAME COLUMN oldest_versions TO versions")  # both databases know it; none is copied


def downgrade() -> None:
    raise NotImplementedError("the ledger is a record: migrations go forward only; restore a backup instead")
