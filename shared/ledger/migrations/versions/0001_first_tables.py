"""The first tables.

Revision ID: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "lease",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("renewals", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_lease")),
    )
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("config", JSON, nullable=True),
        sa.Column("code_version", sa.Text(), nullable=False),
        sa.Column("pack_hash", sa.Text(), nullable=True),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("first_request_at", sa.Double(), nullable=True),
        sa.Column("clock_started_at", sa.Double(), nullable=True),
        sa.Column("spent_s", sa.Double(), nullable=False),
        sa.Column("stopped_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("last_event", sa.BigInteger(), nullable=False),
        sa.Column("last_message", sa.BigInteger(), nullable=False),
        sa.Column("last_draw", sa.BigInteger(), nullable=False),
        sa.Column("last_ready", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "state IN ('announced', 'running', 'paused', 'stopping', 'finished')", name=op.f("ck_runs_state")
        ),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
    )
    op.create_table(
        "events",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("data", JSON, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_events_run_id")),
        sa.PrimaryKeyConstraint("run_id", "sequence", name=op.f("pk_events")),
        sa.UniqueConstraint("run_id", "subject", "kind", "epoch", name=op.f("uq_events_run_id_subject_kind_epoch")),
    )
    op.create_table(
        "inbox",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_inbox_run_id")),
        sa.PrimaryKeyConstraint("run_id", "topic", "position", "digest", name=op.f("pk_inbox")),
    )
    op.create_table(
        "incarnations",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_incarnations_run_id")),
        sa.PrimaryKeyConstraint("run_id", "incarnation", name=op.f("pk_incarnations")),
    )
    op.create_table(
        "outbox",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("message", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("published_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_outbox_run_id")),
        sa.PrimaryKeyConstraint("run_id", "sequence", name=op.f("pk_outbox")),
    )
    op.create_index(
        "ix_outbox_pending",
        "outbox",
        ["run_id", "sequence"],
        unique=False,
        sqlite_where=sa.text("published_at IS NULL"),
        postgresql_where=sa.text("published_at IS NULL"),
    )
    op.create_table(
        "packs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("pack_hash", sa.Text(), nullable=False),
        sa.Column("pack", JSON, nullable=False),
        sa.Column("pack_hidden", JSON, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_packs_run_id")),
        sa.PrimaryKeyConstraint("run_id", "pack_hash", name=op.f("pk_packs")),
    )
    op.create_table(
        "policies",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=False),
        sa.Column("manifest", JSON, nullable=False),
        sa.Column("published_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_policies_run_id")),
        sa.PrimaryKeyConstraint("run_id", "serial", name=op.f("pk_policies")),
    )
    op.create_table(
        "replicas",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("replica", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.Column("ok", sa.Boolean(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("pause_s", sa.Double(), nullable=False),
        sa.Column("applied_at", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_replicas_run_id")),
        sa.PrimaryKeyConstraint("run_id", "replica", name=op.f("pk_replicas")),
    )
    op.create_table(
        "steps",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.Column("committed_at", sa.Double(), nullable=False),
        sa.Column("metrics", JSON, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_steps_run_id")),
        sa.PrimaryKeyConstraint("run_id", "incarnation", "step", name=op.f("pk_steps")),
        sa.UniqueConstraint("run_id", "serial", name=op.f("uq_steps_run_id_serial")),
    )
    op.create_table(
        "problems",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("problem_id", sa.Text(), nullable=False),
        sa.Column("pack_hash", sa.Text(), nullable=False),
        sa.Column("category", sa.Text(), nullable=False),
        sa.Column("cell", sa.Text(), nullable=False),
        sa.Column("admitted_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "pack_hash"], ["packs.run_id", "packs.pack_hash"], name=op.f("fk_problems_run_id_pack_hash")
        ),
        sa.PrimaryKeyConstraint("run_id", "problem_id", name=op.f("pk_problems")),
    )
    op.create_table(
        "groups",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("problem_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("draw", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("reward_config", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("sequence", sa.BigInteger(), nullable=True),
        sa.Column("announced", sa.BigInteger(), nullable=True),
        sa.Column("members", sa.BigInteger(), nullable=False),
        sa.Column("solved", sa.BigInteger(), nullable=False),
        sa.Column("turns", sa.Double(), nullable=False),
        sa.Column("thinking_tokens", sa.Double(), nullable=False),
        sa.Column("oldest_versions", JSON, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.CheckConstraint("state <> 'ready' OR sequence IS NOT NULL", name=op.f("ck_groups_ready_is_ordered")),
        sa.CheckConstraint("state IN ('open', 'ready', 'dropped', 'quarantined')", name=op.f("ck_groups_state")),
        sa.ForeignKeyConstraint(
            ["run_id", "problem_id"],
            ["problems.run_id", "problems.problem_id"],
            name=op.f("fk_groups_run_id_problem_id"),
        ),
        sa.PrimaryKeyConstraint("run_id", "group_id", name=op.f("pk_groups")),
        sa.UniqueConstraint("run_id", "problem_id", "number", name=op.f("uq_groups_run_id_problem_id_number")),
        sa.UniqueConstraint("run_id", "sequence", name=op.f("uq_groups_run_id_sequence")),
    )
    op.create_index(
        "uq_groups_problem_alive",
        "groups",
        ["run_id", "problem_id"],
        unique=True,
        sqlite_where=sa.text("state IN ('open', 'ready')"),
        postgresql_where=sa.text("state IN ('open', 'ready')"),
    )
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("place", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("policy_floor", sa.BigInteger(), nullable=False),
        sa.Column("oldest_version", sa.BigInteger(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("cancelled_at", sa.Double(), nullable=True),
        sa.Column("stop", sa.Text(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("trajectory", JSON, nullable=True),
        sa.Column("effort", JSON, nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "state IN ('requested', 'claimed', 'finished', 'lost', 'scored', 'failed', 'dropped', 'grouped')",
            name=op.f("ck_attempts_state"),
        ),
        sa.CheckConstraint(
            "state NOT IN ('finished', 'scored', 'grouped') OR trajectory IS NOT NULL",
            name=op.f("ck_attempts_finished_has_trajectory"),
        ),
        sa.CheckConstraint("epoch >= 0", name=op.f("ck_attempts_epoch")),
        sa.ForeignKeyConstraint(
            ["run_id", "group_id"], ["groups.run_id", "groups.group_id"], name=op.f("fk_attempts_run_id_group_id")
        ),
        sa.PrimaryKeyConstraint("run_id", "attempt_id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("run_id", "group_id", "place", name=op.f("uq_attempts_run_id_group_id_place")),
    )
    op.create_table(
        "trained",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("reported_age", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "group_id"], ["groups.run_id", "groups.group_id"], name=op.f("fk_trained_run_id_group_id")
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "incarnation", "step"],
            ["steps.run_id", "steps.incarnation", "steps.step"],
            name=op.f("fk_trained_run_id_incarnation_step"),
        ),
        sa.PrimaryKeyConstraint("run_id", "group_id", "incarnation", name=op.f("pk_trained")),
    )
    op.create_index("ix_trained_step", "trained", ["run_id", "incarnation", "step"], unique=False)
    op.create_table(
        "verdicts",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=False),
        sa.Column("solved", sa.Boolean(), nullable=False),
        sa.Column("verdict", JSON, nullable=False),
        sa.Column("terms", JSON, nullable=False),
        sa.Column("reward_config", sa.Text(), nullable=False),
        sa.Column("scored_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "attempt_id"],
            ["attempts.run_id", "attempts.attempt_id"],
            name=op.f("fk_verdicts_run_id_attempt_id"),
        ),
        sa.PrimaryKeyConstraint("run_id", "attempt_id", name=op.f("pk_verdicts")),
    )


def downgrade() -> None:
    raise NotImplementedError("the ledger is a record: migrations go forward only; restore a backup instead")
