"""The database itself refuses what the ledger never does: to change or delete a fact, to lead an attempt or a group back.

The moves are those of `shared.ledger.transitions` (`may_become`, GROUP_MOVES), written out: a migration does not change with
the code. tests/contract/test_ledger.py holds the two against each other for every pair. Whoever makes one of these tables
anew in a later migration must make its guards anew: SQLite drops them with the table.

Revision ID: 0003
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

FACTS = ("events", "trained", "verdicts")
RANK = "CASE {row}.state WHEN 'requested' THEN 0 WHEN 'claimed' THEN 1 WHEN 'finished' THEN 2 WHEN 'lost' THEN 3 ELSE 4 END"
OLD, NEW = RANK.format(row="OLD"), RANK.format(row="NEW")
ENDS = "('failed', 'dropped', 'grouped')"
# An end stays as it is, epoch and all; what lives goes to an end of no older epoch, to a later epoch, or on within its own.
ATTEMPT_BACK = f"""(OLD.state <> NEW.state OR OLD.epoch <> NEW.epoch) AND (
    OLD.state IN {ENDS}
    OR NEW.epoch < OLD.epoch
    OR (NEW.epoch = OLD.epoch AND NEW.state NOT IN {ENDS} AND {NEW} <= {OLD})
)"""
GROUP_BACK = """OLD.state <> NEW.state AND NOT (
    (OLD.state = 'open' AND NEW.state IN ('ready', 'dropped'))
    OR (OLD.state = 'ready' AND NEW.state IN ('quarantined', 'dropped'))
)"""
MOVES = {"attempts": ATTEMPT_BACK, "groups": GROUP_BACK}


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        _postgresql()
    else:
        _sqlite()


def _sqlite() -> None:
    for table in FACTS:
        for action in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER guard_{table}_{action.lower()} BEFORE {action} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table}: facts are neither changed nor deleted'); END"
            )
    for table, back in MOVES.items():
        op.execute(
            f"CREATE TRIGGER guard_{table}_moves BEFORE UPDATE ON {table} WHEN {back} "
            f"BEGIN SELECT RAISE(ABORT, '{table}: no such move'); END"
        )


def _postgresql() -> None:
    # In the order of a leader's commit: neither ends the other.
    op.execute("LOCK TABLE trained, groups, attempts, verdicts, events IN SHARE ROW EXCLUSIVE MODE")
    # restrict_violation: drivers know it as a matter of integrity, like any other constraint's word.
    op.execute(
        "CREATE FUNCTION guard_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION '%: %', TG_TABLE_NAME, TG_ARGV[0] USING ERRCODE = 'restrict_violation'; END $$"
    )
    for table in FACTS:
        for name, action, each in (
            ("rows", "UPDATE OR DELETE", "FOR EACH ROW"),
            ("all", "TRUNCATE", "FOR EACH STATEMENT"),
        ):
            op.execute(
                f"CREATE TRIGGER guard_{table}_{name} BEFORE {action} ON {table} {each} "
                "EXECUTE FUNCTION guard_refuse('facts are neither changed nor deleted')"
            )
    for table, back in MOVES.items():
        op.execute(
            f"CREATE TRIGGER guard_{table}_moves BEFORE UPDATE ON {table} FOR EACH ROW WHEN ({back}) "
            "EXECUTE FUNCTION guard_refuse('no such move')"
        )


def downgrade() -> None:
    raise NotImplementedError("the ledger is a record: migrations go forward only; restore a backup instead")
