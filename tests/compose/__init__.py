"""The platform in docker compose: rehearsed as people run it, from `up --wait` to the ledger's audit. `make rehearse`."""
