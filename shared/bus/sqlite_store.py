"""The log in one SQLite file (WAL): all SQL of the embedded bus. Synchronous; one `Store` belongs to one thread.

Tables
- `messages`: the log. `offset` rises over all topics in commit order, so the offsets of a partition rise with gaps.
  `source`: of a dead letter, which delivery it was; each is buried once.
- `positions`: (group, topic, partition) -> the next offset to read; everything below it is acknowledged, and so is what
  `finished` names beyond it (shared.bus.tracking.write_ranges).
- `members`, `owners`: who reads, until when it counts as alive, and which partitions it holds.
- `state`: counters; `membership` rises whenever `members` or `owners` change in a way that others must look at.
- `topics`: what the purge has to know about a topic.
- `gone`: what retention deleted of a group's partition before the group acknowledged it, until a member is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shared.bus import Standing
from shared.bus.gone import Gone
from shared.bus.tracking import read_ranges
from shared.contracts.topics import LETTERS, YEAR_H, Topic
from shared.process import namespace
from shared.sqlite import write_ahead

SCHEMA_VERSION = 5
BUSY_S = 10.0  # how long a write waits for another process's; transactions take about a millisecond
RETENTION_OVER = "topic = :t AND at < :b"  # deleted whoever has read it
PURGE_CHUNK = 500  # rows deleted in one transaction, so that publishers never wait long

_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    offset INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, part INTEGER NOT NULL, key TEXT NOT NULL,
    value BLOB NOT NULL, headers TEXT NOT NULL, at REAL NOT NULL, source TEXT);
CREATE INDEX IF NOT EXISTS messages_of_topic ON messages (topic);
CREATE INDEX IF NOT EXISTS letters_by_source ON messages (topic, source) WHERE source IS NOT NULL;
CREATE TABLE IF NOT EXISTS positions (
    grp TEXT NOT NULL, topic TEXT NOT NULL, part INTEGER NOT NULL, position INTEGER NOT NULL,
    finished TEXT NOT NULL DEFAULT '', PRIMARY KEY (grp, topic, part)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS members (
    member TEXT PRIMARY KEY, process TEXT NOT NULL, grp TEXT NOT NULL, topics TEXT NOT NULL,
    host TEXT NOT NULL, pid INTEGER NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (
    grp TEXT NOT NULL, topic TEXT NOT NULL, part INTEGER NOT NULL, member TEXT NOT NULL,
    PRIMARY KEY (grp, topic, part)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (grp TEXT NOT NULL, topic TEXT NOT NULL, PRIMARY KEY (grp, topic)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS topics (
    topic TEXT PRIMARY KEY, partitions INTEGER NOT NULL, compacted INTEGER NOT NULL, broadcast INTEGER NOT NULL,
    retention_s REAL NOT NULL, compact_after_s REAL NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value REAL NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO state VALUES ('membership', 0), ('purged_at', 0);
"""

_GONE_SINCE_5 = """
CREATE TABLE IF NOT EXISTS gone (
    grp TEXT NOT NULL, topic TEXT NOT NULL, part INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    records INTEGER NOT NULL, PRIMARY KEY (grp, topic, part)) WITHOUT ROWID;
"""
_SCHEMA += _GONE_SINCE_5

_LETTERS_SINCE_3 = f"""
ALTER TABLE messages ADD COLUMN source TEXT;
UPDATE messages SET source = json_extract(headers, '$.dead-letter-source') WHERE topic LIKE '%{LETTERS}';
CREATE INDEX letters_by_source ON messages (topic, source) WHERE source IS NOT NULL;
UPDATE topics SET broadcast = 1, retention_s = {YEAR_H * 3600} WHERE topic LIKE '%{LETTERS}';
"""


class Row(NamedTuple):
    """What is appended: one message of one topic. `source`: of a dead letter."""

    topic: str
    part: int
    key: str
    value: bytes
    headers: str  # JSON
    source: str | None = None


class Stored(NamedTuple):
    offset: int
    part: int
    key: str
    value: bytes
    headers: str


class Position(NamedTuple):
    offset: int  # the next to read
    finished: str  # beyond it (shared.bus.tracking.write_ranges)


def place() -> str:
    """Where a process id means something: host and PID namespace."""
    try:
        return f"{socket.gethostname()}:{namespace()}"
    except OSError:
        return socket.gethostname()


class Store:
    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        """`fsync`: what is written survives a power loss too (synchronous=FULL), not only any death of a process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            write_ahead(self._db, BUSY_S)
            self._prepare(fsync)
        except sqlite3.Error:
            self._db.close()
            raise
        self._place = place()

    def _prepare(self, fsync: bool) -> None:
        self._db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'NORMAL'}")
        with self.write():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if not 0 <= version <= SCHEMA_VERSION:
                raise sqlite3.DatabaseError(f"schema {version}; this version reads {SCHEMA_VERSION}")
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
            if version == 1:
                self._db.execute("ALTER TABLE positions ADD COLUMN finished TEXT NOT NULL DEFAULT ''")
            if version in (1, 2):
                for statement in _LETTERS_SINCE_3.split(";"):
                    self._db.execute(statement)
            if version in (1, 2, 3):
                self._db.execute("ALTER TABLE topics ADD COLUMN compact_after_s REAL NOT NULL DEFAULT 0")
            if version in (1, 2, 3, 4):
                self._db.execute(_GONE_SINCE_5)
            if version != SCHEMA_VERSION:
                self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @contextlib.contextmanager
    def write(self) -> Iterator[None]:
        """One short transaction."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()

    # The log.

    def append(self, rows: Sequence[Row]) -> None:
        now = time.time()
        self._db.executemany(
            "INSERT INTO messages (topic, part, key, value, headers, source, at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(*row, now) for row in rows],
        )

    def has_dead_letter(self, topic: str, source: str) -> bool:
        """True if `source` was buried before."""
        found = self._db.execute("SELECT 1 FROM messages WHERE topic = ? AND source = ? LIMIT 1", (topic, source))
        return found.fetchone() is not None

    def changed_by_others(self) -> int:
        """A number that differs from the last call's if another process has committed since. Cheap."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def tails(self, after: int) -> dict[str, int]:
        """Topic -> its last offset, for topics with messages beyond `after`."""
        return dict(
            self._db.execute(
                "SELECT topic, max(offset) FROM messages NOT INDEXED WHERE offset > ? GROUP BY topic", (after,)
            )
        )

    def tail(self, topic: str | None = None) -> int:
        """Last offset of a topic or of the log; 0 if empty."""
        if topic is None:
            sql, args = "SELECT max(offset) FROM messages", ()
        else:
            sql, args = "SELECT max(offset) FROM messages WHERE topic = ?", (topic,)  # type: ignore[assignment]
        return int(self._db.execute(sql, args).fetchone()[0] or 0)

    def fetch(self, topic: str, parts: Collection[int] | None, first: int, last: int, limit: int) -> list[Stored]:
        """Messages of `topic` at offsets first..last in `parts` (None: all), in order, `limit` at most."""
        only = "" if parts is None else f"AND part IN ({','.join(str(int(p)) for p in sorted(parts))})"
        rows = self._db.execute(
            f"SELECT offset, part, key, value, headers FROM messages WHERE topic = ? AND offset BETWEEN ? AND ? {only} "
            "ORDER BY offset LIMIT ?",
            (topic, first, last, limit),
        ).fetchall()
        return [Stored(*row) for row in rows]

    # Groups.

    def know(self, topic: Topic, *, keep: bool) -> None:
        """Remembers what the purge needs. `keep`: everything for its retention; a topic of which it was ever said, as who
        reads it as broadcast does, stays so."""
        self._db.execute(
            "INSERT INTO topics VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
            "partitions = excluded.partitions, compacted = excluded.compacted, "
            "broadcast = max(broadcast, excluded.broadcast), retention_s = excluded.retention_s, "
            "compact_after_s = excluded.compact_after_s",
            (
                topic.name,
                topic.partitions,
                topic.compacted,
                keep,
                topic.retention_h * 3600.0,
                topic.compact_after_h * 3600.0,
            ),
        )

    def join(self, member: str, process: str, group: str, topics: Sequence[str], expires: float) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, ?, ?)",
            (member, process, group, json.dumps(list(topics)), self._place, os.getpid(), expires),
        )
        self._db.executemany("INSERT OR IGNORE INTO groups VALUES (?, ?)", [(group, topic) for topic in topics])
        self.announce()

    def leave(self, member: str) -> None:
        self._db.execute("DELETE FROM owners WHERE member = ?", (member,))
        self._db.execute("DELETE FROM members WHERE member = ?", (member,))
        self.announce()

    def announce(self) -> None:
        """Every member of every process looks at the assignment again."""
        self._db.execute("UPDATE state SET value = value + 1 WHERE name = 'membership'")

    def membership(self) -> int:
        return int(self._db.execute("SELECT value FROM state WHERE name = 'membership'").fetchone()[0])

    def heartbeat(self, process: str, expires: float) -> set[str]:
        """The members of `process` that are still in; those that are not have lost their partitions."""
        self._db.execute("UPDATE members SET expires = ? WHERE process = ?", (expires, process))
        return {member for (member,) in self._db.execute("SELECT member FROM members WHERE process = ?", (process,))}

    def dead(self, now: float) -> list[str]:
        """Members whose lease ran out or whose process on this host has gone."""
        found = []
        for member, host, pid, expires in self._db.execute("SELECT member, host, pid, expires FROM members"):
            if expires < now or (host == self._place and not _alive(pid)):
                found.append(member)
        return found

    def members(self, group: str, topic: str) -> set[str]:
        rows = self._db.execute("SELECT member, topics FROM members WHERE grp = ?", (group,))
        return {member for member, topics in rows if topic in json.loads(topics)}

    def owners(self, group: str, topic: str) -> dict[int, str]:
        return dict(self._db.execute("SELECT part, member FROM owners WHERE grp = ? AND topic = ?", (group, topic)))

    def take(self, group: str, topic: str, parts: Collection[int], member: str) -> dict[int, Position]:
        """Owns `parts` and returns where they stand."""
        self._db.executemany(
            "INSERT OR REPLACE INTO owners VALUES (?, ?, ?, ?)", [(group, topic, p, member) for p in parts]
        )
        known = self.positions(group, topic)
        return {part: known.get(part, Position(0, "")) for part in parts}

    def release(self, group: str, topic: str, parts: Collection[int], member: str) -> None:
        self._db.executemany(
            "DELETE FROM owners WHERE grp = ? AND topic = ? AND part = ? AND member = ?",
            [(group, topic, part, member) for part in parts],
        )

    def positions(self, group: str, topic: str) -> dict[int, Position]:
        found = self._db.execute(
            "SELECT part, position, finished FROM positions WHERE grp = ? AND topic = ?", (group, topic)
        )
        return {part: Position(position, finished) for part, position, finished in found}

    def commit(self, group: str, positions: Sequence[tuple[str, int, Position]], member: str) -> None:
        """(topic, partition, position) triples. Fenced: a partition that `member` no longer owns stays as it is."""
        self._db.executemany(
            "INSERT INTO positions SELECT :g, :t, :p, :n, :f WHERE EXISTS "
            "(SELECT 1 FROM owners WHERE grp = :g AND topic = :t AND part = :p AND member = :m) "
            "ON CONFLICT DO UPDATE SET position = excluded.position, finished = excluded.finished "
            "WHERE excluded.position >= position",
            [
                {"g": group, "t": topic, "p": part, "n": at.offset, "f": at.finished, "m": member}
                for topic, part, at in positions
            ],
        )

    def lag(self, group: str, topic: str) -> int:
        """Messages at or beyond the committed position, over all partitions. What every partition has left behind is not
        looked at: a topic may hold a week of it, and this is asked every few seconds."""
        first = self._behind(topic, self.positions(group, topic))
        return int(
            self._db.execute(
                "SELECT count(*) FROM messages m "
                "LEFT JOIN positions p ON p.grp = ? AND p.topic = m.topic AND p.part = m.part "
                "WHERE m.topic = ? AND m.offset >= ? AND m.offset >= coalesce(p.position, 0)",
                (group, topic, first),
            ).fetchone()[0]
        )

    def standing(self, group: str, topic: str) -> dict[tuple[str, int], Standing]:
        known = self.positions(group, topic)
        ends = self._db.execute(
            "SELECT part, max(offset) + 1 FROM messages WHERE topic = ? AND offset >= ? GROUP BY part",
            (topic, self._behind(topic, known)),
        )
        return {(topic, part): Standing(known[part].offset if part in known else 0, end) for part, end in ends}

    def _behind(self, topic: str, known: Mapping[int, Position]) -> int:
        """An offset that no partition has left behind; 0 where one has acknowledged nothing."""
        found = self._db.execute("SELECT partitions FROM topics WHERE topic = ?", (topic,)).fetchone()
        begun = found is not None and all(part in known for part in range(found[0]))
        return min(at.offset for at in known.values()) if begun and known else 0

    # Retention.

    def take_gone(self, member: str) -> list[Gone]:
        """Return what retention deleted of the partitions that `member` owns before its group acknowledged it, and forget it."""
        mine = (
            "FROM gone WHERE EXISTS (SELECT 1 FROM owners o WHERE o.member = ? AND o.grp = gone.grp "
            "AND o.topic = gone.topic AND o.part = gone.part)"
        )
        found = self._db.execute(f"SELECT topic, part, first, last, records {mine}", (member,)).fetchall()
        if found:
            self._db.execute(f"DELETE {mine}", (member,))
        return [Gone(*row) for row in found]

    def _note_gone(self, topic: str, doomed: Sequence[tuple[int, int]]) -> None:
        """Remember, for each group that ever joined, which of the `doomed` (offset, partition) it had not acknowledged."""
        for (group,) in self._db.execute("SELECT grp FROM groups WHERE topic = ?", (topic,)).fetchall():
            stands = self.positions(group, topic)
            finished = {part: set(read_ranges(at.offset, at.finished)) for part, at in stands.items()}
            lost: dict[int, list[int]] = {}
            for offset, part in doomed:
                if part not in stands or (offset >= stands[part].offset and offset not in finished[part]):
                    lost.setdefault(part, []).append(offset)
            self._db.executemany(
                "INSERT INTO gone VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET first = min(first, excluded.first), "
                "last = max(last, excluded.last), records = records + excluded.records",
                [(group, topic, part, min(at), max(at), len(at)) for part, at in lost.items()],
            )

    def purge_due(self, every_s: float) -> bool:
        """True for one process per period."""
        now = time.time()
        (at,) = self._db.execute("SELECT value FROM state WHERE name = 'purged_at'").fetchone()
        if 0 <= now - at < every_s:
            return False
        with self.write():
            taken = self._db.execute(
                "UPDATE state SET value = ? WHERE name = 'purged_at' AND value = ?", (now, at)
            ).rowcount
        return taken == 1

    def purge(self, keep_acknowledged_s: float, most: int | None = None) -> int:
        """Deletes what nobody needs, `most` or a little more of it; returns how many messages.

        Compacted topics keep the last message of each key for their retention, and earlier ones for the time that the topic
        says, at least `keep_acknowledged_s`. A topic that somebody reads as broadcast
        keeps everything for its retention, as does one that no group has read, and one of dead letters. Else a message
        goes when every group that ever joined has acknowledged it and it is older than `keep_acknowledged_s`, or when its
        retention is over.
        """
        now = time.time()
        known = self._db.execute(
            "SELECT topic, compacted, broadcast, retention_s, compact_after_s FROM topics"
        ).fetchall()
        deleted = 0
        for topic, compacted, broadcast, retention_s, compact_after_s in known:
            recent = now - max(keep_acknowledged_s, compact_after_s)
            for where, values in self._unneeded(topic, bool(compacted), bool(broadcast), now - retention_s, recent):
                left = None if most is None else most - deleted
                deleted += self._delete(where, values, left, unread=where == RETENTION_OVER)
        return deleted

    @staticmethod
    def _unneeded(
        topic: str, compacted: bool, broadcast: bool, retained: float, recent: float
    ) -> Iterator[tuple[str, dict[str, object]]]:
        """Conditions; `retained`, `recent`: Unix seconds before which a message is too old, or old enough."""
        if compacted:
            yield (
                "topic = :t AND at < :b AND EXISTS (SELECT 1 FROM messages n WHERE n.topic = messages.topic "
                "AND n.key = messages.key AND n.offset > messages.offset)",
                {"t": topic, "b": recent},
            )
        yield RETENTION_OVER, {"t": topic, "b": retained}
        if not broadcast and not compacted:
            yield (
                "topic = :t AND at < :b AND EXISTS (SELECT 1 FROM groups g WHERE g.topic = :t) "
                "AND NOT EXISTS (SELECT 1 FROM groups g LEFT JOIN positions p "
                "ON p.grp = g.grp AND p.topic = g.topic AND p.part = messages.part "
                "WHERE g.topic = :t AND coalesce(p.position, 0) <= messages.offset)",
                {"t": topic, "b": recent},
            )

    def _delete(self, where: str, values: dict[str, object], most: int | None, *, unread: bool) -> int:
        """`unread`: there may be some that a group has not acknowledged."""
        deleted = 0
        while most is None or deleted < most:
            doomed = self._db.execute(
                f"SELECT offset, part FROM messages WHERE {where} LIMIT {PURGE_CHUNK}", values
            ).fetchall()
            if not doomed:
                break
            with self.write():
                if unread:
                    self._note_gone(str(values["t"]), doomed)
                self._db.executemany("DELETE FROM messages WHERE offset = ?", [(offset,) for offset, _ in doomed])
            deleted += len(doomed)
        return deleted


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
