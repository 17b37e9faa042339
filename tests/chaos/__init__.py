"""A whole platform on the real servers, struck at random moments: `make chaos`, `python -m tests.chaos`.

A run with the real trainer and the small base policy practises meanwhile; afterwards its ledger is audited, and the exit
code is 1 if anything was lost, trained twice or too old, or if somebody did not come back.

    schedule.py   who is struck when, from a seed (pure)
    platform.py   the services, the run, and what can be seen of both from outside
    strikes.py    kill -9, a worker or trainer frozen past its lease, a server stopped or frozen
    report.py     the table, the verdict, the JSON file
"""
