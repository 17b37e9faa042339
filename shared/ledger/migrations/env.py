"""Alembic's entry point: runs the migrations on the connection that `shared.ledger.migrate` opened."""

from alembic import context

from shared.ledger.models import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
