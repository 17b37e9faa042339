"""Opening a SQLite file for several processes at once."""

from __future__ import annotations

import sqlite3
import time

_PAUSE_S = 0.02


def write_ahead(connection: sqlite3.Connection, patience_s: float) -> None:
    """Switches to the write-ahead log, in which readers never wait for a writer.

    Of two connections that switch a new file at the same moment SQLite refuses one at once, without its busy timeout
    (each would wait for the other's read lock), hence the tries here. Raises sqlite3.OperationalError where the file is
    still locked after `patience_s` seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
