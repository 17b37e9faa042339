"""The thread of the embedded bus: all SQL of a process, publishes, acknowledgements, reading ahead, in short transactions."""

from __future__ import annotations

import json
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import structlog

from shared.bus import BusUnavailable, gone
from shared.bus.gone import Gone
from shared.bus.inbox import Inbox, Lease, Received
from shared.bus.sqlite_members import Membership, Subscription
from shared.bus.sqlite_store import Row, Store
from shared.contracts import codec
from shared.contracts.topics import ALERTS, Topic

POLL_BUSY_S, POLL_IDLE_S = 0.005, 0.05  # between looks at the file: just after messages came, and when none do
COMMIT_EVERY_S = 0.05  # acknowledgements are written this often at most; a crash gives those of the last moment again
PURGE_EVERY_S = 120.0
# Publishes and the heartbeats of leases wait meanwhile, and a consumer that comes back after days leaves millions of messages.
PURGE_AT_ONCE, PURGE_REST_S = 10_000, 1.0  # messages, a sixth of a second; between two such parts
BACK_OFF_S = 0.5  # after an error of the file

log = structlog.get_logger()


class Worker:
    """The thread that owns the file. Other threads only append to its queues and wake it."""

    def __init__(self, store: Store, client: str, lease_s: float, keep_acknowledged_s: float) -> None:
        self._store = store
        self._process = f"{client}#{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._members = Membership(store, self._process, lease_s, self._know)
        self._keep_s = keep_acknowledged_s
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._appends: list[tuple[list[Row], Future[None]]] = []
        self._calls: list[tuple[Callable[[Store], Any], Future[Any]]] = []
        self._arrivals: list[Subscription] = []
        self._failure: BusUnavailable | None = None
        self._stopping = False
        self._tails: dict[str, int] = {}
        self._seen = store.tail()  # every message up to here is reflected in `_tails` of the topics that are read
        self._tails_stale = True  # there may be messages beyond `_seen`
        self._others = -1  # the store's counter of other processes' commits, at the last look
        self._next_commit = 0.0
        self._next_purge = time.monotonic() + PURGE_EVERY_S
        self._purging = False  # in the middle of it
        self._poll_s = POLL_IDLE_S
        self._thread = threading.Thread(target=self._run, name=f"bus-{client}", daemon=True)
        self._thread.start()

    # From any thread.

    def wake(self) -> None:
        self._signals.put(None)

    def append(self, rows: list[Row]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self._refuse_if_over()
            self._appends.append((rows, future))
            first = len(self._appends) == 1
        if first:
            self.wake()
        return future

    def call(self, function: Callable[[Store], Any]) -> Future[Any]:
        """Runs `function` in the thread, after everything that was settled before this call is written."""
        future: Future[Any] = Future()
        with self._lock:
            self._refuse_if_over()
            self._calls.append((function, future))
        self.wake()
        return future

    def subscribe(self, topics: Sequence[Topic], group: str | None, inbox: Inbox) -> None:
        member = f"{self._process}/{uuid.uuid4().hex[:8]}"
        with self._lock:
            self._refuse_if_over()
            self._arrivals.append(Subscription(topics, group, inbox, member))
        self.wake()

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
        self.wake()
        self._thread.join()

    def _refuse_if_over(self) -> None:
        if self._failure:
            raise self._failure
        if self._stopping:
            raise BusUnavailable("the bus of this process is closed")

    # In the thread.

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._signals.get(timeout=self._poll_s)
                    while not self._signals.empty():
                        self._signals.get_nowait()
                except queue.Empty:
                    pass
                stopping = self._stopping
                try:
                    self._cycle(last=stopping)
                except sqlite3.Error as error:
                    log.error("bus.file", path=str(self._store.path), error=str(error))
                    if not stopping:
                        time.sleep(BACK_OFF_S)
                if stopping:
                    self._end(None)
                    return
        except BaseException as error:
            log.exception("bus.worker_died")
            self._end(BusUnavailable(f"the bus worker of this process died: {error!r}"))
        finally:
            self._store.close()

    def _end(self, failure: BusUnavailable | None) -> None:
        with self._lock:
            self._stopping, self._failure = True, failure
            appends, self._appends = self._appends, []
            calls, self._calls = self._calls, []
            everyone = self._members.subscriptions + self._arrivals
        for _, future in [*appends, *calls]:
            _resolve(future, failure or BusUnavailable("the bus of this process is closed"))
        for subscription in everyone:
            subscription.inbox.close(failure)

    def _cycle(self, *, last: bool) -> None:
        now = time.monotonic()
        with self._lock:
            appends, self._appends = self._appends, []
            calls, self._calls = self._calls, []
            arrivals, self._arrivals = self._arrivals, []
        self._members.subscriptions += arrivals
        try:
            moved = self._look_at_others()
            left = self._collect_settled()
            beat = moved or left or last or bool(arrivals) or now >= self._members.next_heartbeat
            self._write(appends, now, beat=beat, commit=bool(appends or calls) or now >= self._next_commit, last=last)
            if not last:
                self._look_for_messages(published=bool(appends))
                self._purge_in_turn(now)
        except sqlite3.Error as error:
            self._members.forget()
            for subscription in arrivals:
                subscription.started = False
            for _, future in [*appends, *calls]:
                _resolve(future, BusUnavailable(f"bus file {self._store.path}: {error}"))
            raise
        for function, future in calls:
            try:
                _resolve(future, None, function(self._store))
            except Exception as error:
                _resolve(future, error)

    def purge(self, store: Store, most: int | None = None) -> int:
        deleted = store.purge(self._keep_s, most)
        if deleted:
            log.info("bus.purged", messages=deleted)
        return deleted

    def _purge_in_turn(self, now: float) -> None:
        """A part of it, and the next a moment later, until nothing is left."""
        if now >= self._next_purge:
            self._next_purge = now + PURGE_EVERY_S
            if self._purging or self._store.purge_due(PURGE_EVERY_S):
                self._purging = self.purge(self._store, PURGE_AT_ONCE) >= PURGE_AT_ONCE
                if self._purging:
                    self._next_purge = now + PURGE_REST_S

    def _look_at_others(self) -> bool:
        """True if the members or owners of some group have changed since this process looked."""
        others = self._store.changed_by_others()
        if others == self._others:
            return False
        self._others = others
        self._tails_stale = True
        return self._members.changed()

    def _know(self, topic: str) -> None:
        self._tails[topic] = self._store.tail(topic)

    def _collect_settled(self) -> bool:
        """Moves the trackers. True if a subscription has begun to leave."""
        left = False
        for subscription in self._members.subscriptions:
            for item, reason in subscription.inbox.drain():
                if reason is None:
                    subscription.acknowledge(item)
                else:
                    subscription.burying.append((item, reason))
            if subscription.inbox.abandoned and not subscription.inbox.closed:
                subscription.inbox.close()
            if subscription.inbox.closed and not subscription.leaving:
                subscription.leaving = left = True
        return left

    def _write(
        self, appends: list[tuple[list[Row], Future[None]]], now: float, *, beat: bool, commit: bool, last: bool
    ) -> None:
        """One transaction for all that is due; nothing due, no transaction. A position that passes a buried message is
        never written before the dead letter: both are in every transaction until one succeeds."""
        buried = [(s, *entry) for s in self._members.subscriptions for entry in s.burying]
        for subscription, item, _ in buried:
            subscription.acknowledge(item)
        moved = [(s, stands) for s in self._members.subscriptions if commit and (stands := s.uncommitted())]
        if not (appends or buried or moved or beat):
            return
        with self._store.write():
            for rows, _ in appends:
                self._store.append(rows)
            self._append_dead_letters(buried)
            for subscription, stands in moved:
                self._members.commit(subscription, stands)
            told: list[tuple[str, list[Gone]]] = []
            if beat:
                self._members.beat(now, last)
                told = self._tell_gone()
        for group, found in told:
            gone.count(group, found)
        for _, future in appends:
            _resolve(future, None, None)
        for subscription, item, _ in buried:
            subscription.burying.clear()
            subscription.inbox.buried([item])
        for subscription, stands in moved:
            for lease, at in stands.items():
                lease.committed, lease.noted = at
            subscription.advanced.clear()
        self._next_commit = now + COMMIT_EVERY_S
        self._tails_stale = self._tails_stale or bool(appends)

    def _tell_gone(self) -> list[tuple[str, list[Gone]]]:
        """Write alerts about what retention deleted of our partitions. Return it by group, to be counted once it is durable."""
        told = []
        for subscription in self._members.subscriptions:
            if subscription.group is not None and (found := self._store.take_gone(subscription.member)):
                alert = gone.alert(subscription.group, found)
                data, headers = codec.encode(ALERTS, alert)
                self._store.append([Row(ALERTS.name, 0, alert.run, data, json.dumps(headers))])
                told.append((subscription.group, found))
        self._tails_stale = self._tails_stale or bool(told)
        return told

    def _append_dead_letters(self, buried: list[tuple[Subscription, Received, str]]) -> None:
        for subscription, item, reason in buried:
            source = f"{item.topic.name}/{item.offset}/{subscription.group or ''}"
            if self._store.has_dead_letter(item.topic.dead_letter, source):
                continue
            headers = {**item.headers, "dead-letter-reason": reason, "dead-letter-source": source}
            self._store.append([Row(item.topic.dead_letter, 0, item.key, item.data, json.dumps(headers), source)])
            log.warning("bus.buried", topic=item.topic.name, offset=item.offset, key=item.key, reason=reason)

    # Reading.

    def _look_for_messages(self, *, published: bool) -> None:
        if self._tails_stale:
            self._tails_stale = False
            fresh = self._store.tails(self._seen)
            self._tails.update(fresh)
            self._seen = max([self._seen, *fresh.values()])
        came = 0
        for subscription in self._members.subscriptions:
            came += self._fill(subscription)
            subscription.look_back()
        busy = bool(came or published)
        self._poll_s = POLL_BUSY_S if busy else min(POLL_IDLE_S, self._poll_s * 1.5)

    def _fill(self, subscription: Subscription) -> int:
        """Reads ahead for one subscription; returns how many messages it got."""
        came = 0
        for name, topic in subscription.topics.items():
            tail = self._tails.get(name, 0)
            if subscription.read_to.get(name) == tail:
                continue
            behind: dict[int, list[Lease]] = {}
            for lease in subscription.leases.values():
                if lease.topic.name == name and lease.read <= tail and lease.revoke_by is None:
                    behind.setdefault(lease.read, []).append(lease)
            for first in sorted(behind):
                room = subscription.inbox.room()
                if room <= 0:
                    return came
                count = self._read(subscription, topic, behind[first], first, tail, room)
                came += count
                if count == room:
                    return came
            subscription.read_to[name] = tail
        return came

    def _read(
        self, subscription: Subscription, topic: Topic, leases: list[Lease], first: int, tail: int, room: int
    ) -> int:
        by_part = {lease.partition: lease for lease in leases}
        everything = subscription.group is None or len(by_part) == topic.partitions
        rows = self._store.fetch(topic.name, None if everything else by_part.keys(), first, tail, room)
        items = []
        for row in rows:
            lease = by_part.get(row.part) or (by_part.get(-1) if subscription.group is None else None)
            if lease is None:  # written when the topic had more partitions
                continue
            headers = json.loads(row.headers)
            if subscription.group is not None and lease.tracker.give(row.offset):
                subscription.advanced.add(lease)  # the position has moved
                continue
            item = Received(subscription.inbox, lease, row.key, None, headers, row.offset, row.value)
            try:
                item.message = codec.decode(topic, row.value, headers)
            except codec.UnreadableMessage as error:
                if subscription.group is None:
                    subscription.inbox.skip(item, str(error))
                else:
                    subscription.burying.append((item, str(error)))
                continue
            items.append(item)
        upto = rows[-1].offset if len(rows) == room else tail
        for lease in leases:
            lease.read = upto + 1
        if items:
            subscription.inbox.offer(items)
        return len(rows)


def _resolve(future: Future[Any], error: BaseException | None, result: Any = None) -> None:
    """Answers a caller, unless it has gone or was answered."""
    if future.done() or not (future.running() or future.set_running_or_notify_cancel()):
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
