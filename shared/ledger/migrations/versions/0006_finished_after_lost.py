"""A finished attempt is no longer lost by silence: `finished` ranks above `lost`. Which epoch a trajectory is of, and how
long its grading may take, are kept with the attempt.

Revision ID: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# As in 0003, with `lost` and `finished` the other way round.
RANK = "CASE {row}.state WHEN 'requested' THEN 0 WHEN 'claimed' THEN 1 WHEN 'lost' THEN 2 WHEN 'finished' THEN 3 ELSE 4 END"
OLD, NEW = RANK.format(row="OLD"), RANK.format(row="NEW")
ENDS = "('failed', 'dropped', 'grouped')"
BACK = f"""(OLD.state <> NEW.state OR OLD.epoch <> NEW.epoch) AND (
    OLD.state IN {ENDS}
    OR NEW.epoch < OLD.epoch
    OR (NEW.epoch = OLD.epoch AND NEW.state NOT IN {ENDS} AND {NEW} <= {OLD})
)"""


def upgrade() -> None:
    op.add_column("attempts", sa.Column("sampled", sa.BigInteger(), nullable=True))
    op.add_column("attempts", sa.Column("grading_s", sa.Double(), nullable=False, server_default="0"))
    op.add_column("attempts", sa.Column("grade_at", sa.Double(), nullable=True))
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER IF EXISTS guard_attempts_moves ON attempts")
        op.execute(
            f"CREATE TRIGGER guard_attempts_moves BEFORE UPDATE ON attempts FOR EACH ROW WHEN ({BACK}) "
            "EXECUTE FUNCTION guard_refuse('no such move')"
        )
        return
    op.execute("DROP TRIGGER IF EXISTS guard_attempts_moves")
    op.execute(
        f"CREATE TRIGGER guard_attempts_moves BEFORE UPDATE ON attempts WHEN {BACK} "
        "BEGIN SELECT RAISE(ABORT, 'attempts: no such move'); END"
    )


def downgrade() -> None:
    raise NotImplementedError("the ledger is a record: migrations go forward only; restore a backup instead")
