"""Alembic migrations of the ledger, applied by `shared.ledger.migrate`."""
