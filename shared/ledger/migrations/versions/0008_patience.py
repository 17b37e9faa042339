"""How long the scheduler has waited for what does not come, so that one that dies again and again still comes to the end of it.

Revision ID: 0008
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("attempts", sa.Column("asked_at", sa.Double(), nullable=False, server_default="0"))
    op.add_column("attempts", sa.Column("repeats", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("attempts", sa.Column("gradings", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("attempts", sa.Column("overtaken_at", sa.Double(), nullable=True))
    op.create_table(
        "listening",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", JSON, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_listening"),
    )


def downgrade() -> None:
    raise NotImplementedError("the ledger is a record: migrations go forward only; restore a backup instead")
