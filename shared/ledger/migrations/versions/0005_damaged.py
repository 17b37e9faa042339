"""Of a replica that cannot load a version: whether the version is damaged, and which one the replica still holds.

Revision ID: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("replicas", sa.Column("damaged", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("replicas", sa.Column("serving", sa.BigInteger(), nullable=False, server_default="-1"))


def downgrade() -> None:
    raise NotImplementedError("the ledger is a record: migrations go forward only; restore a backup instead")
