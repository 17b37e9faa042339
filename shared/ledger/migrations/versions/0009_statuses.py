"""How every run stands is announced on `runs.state`: once here for the runs of before, whose services heard it on another topic.

Revision ID: 0009
"""

import json
import time

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

RUNS = sa.table(
    "runs",
    *(sa.column(name) for name in ("run_id", "state", "reason", "drain", "last_message")),
    sa.column("config", sa.JSON()),
)
EVENTS = sa.table("events", *(sa.column(name) for name in ("run_id", "kind", "subject", "at")))
OUTBOX = sa.table(
    "outbox",
    *(sa.column(name) for name in ("run_id", "sequence", "topic", "key", "created_at")),
    sa.column("message", sa.LargeBinary()),
)


def upgrade() -> None:
    connection = op.get_bind()
    for run in connection.execute(sa.select(RUNS).where(RUNS.c.config.is_not(None))).all():
        if not run.config:
            continue
        of_the_run = sa.select(EVENTS.c.kind, EVENTS.c.at).where(EVENTS.c.run_id == run.run_id, EVENTS.c.subject == "")
        events = connection.execute(of_the_run).all()
        status = {
            "type": "RunStatus",
            "run": run.run_id,
            "state": run.state,
            "number": int(1000 * max((at for _, at in events), default=0.0)),
            "configs": [run.config],
            "started": min((at for kind, at in events if kind == "run.configured"), default=0.0),
            "since": max((at for kind, at in events if kind == f"run.{run.state}"), default=0.0),
            "reason": run.reason,
            "drain": bool(run.drain),
            "admitted": any(kind == "problems.complete" for kind, _ in events),
        }
        sequence = run.last_message + 1
        row = {"run_id": run.run_id, "sequence": sequence, "topic": "runs.state", "key": run.run_id}
        connection.execute(OUTBOX.insert().values(**row, message=json.dumps(status).encode(), created_at=time.time()))
        connection.execute(RUNS.update().where(RUNS.c.run_id == run.run_id).values(last_message=sequence))


def downgrade() -> None:
    raise NotImplementedError("the ledger is a record: migrations go forward only; restore a backup instead")
