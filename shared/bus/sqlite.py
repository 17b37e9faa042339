"""The embedded bus: a durable log in one SQLite file, shared by all processes of a machine, with Kafka's semantics.

Invariants
- All SQL runs in one thread per process (`_Worker`), never on the event loop. Publishes that wait when the thread looks
  become durable in one transaction (group commit).
- A group's partition has one owner at a time. Owners heartbeat; a dead member's partitions move when its lease is over,
  at once if its process on this host is gone. Commits are fenced by ownership.
- A rebalance drains: a partition that moves is given no new deliveries, and changes hands when what is in flight is
  settled, after `REVOKE_GRACE_S` in any case.
- A group that never read a topic starts at its beginning.

How far it reaches: any number of processes on one machine, a few thousand messages a second, one file. The file
must lie on a local disk (SQLite's WAL needs shared memory). Delays asked for by `retry` live in the consumer: after its
death the message comes again at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import structlog

from shared.bus import BusUnavailable
from shared.bus.assignment import partition_of, share
from shared.bus.inbox import Deliveries, Inbox, Lease, Received
from shared.bus.sqlite_store import Row, Store
from shared.contracts import codec
from shared.contracts.topics import Topic

POLL_BUSY_S, POLL_IDLE_S = 0.005, 0.05  # between looks at the file: just after messages came, and when none do
COMMIT_EVERY_S = 0.05  # acknowledgements are written this often at most; a crash gives those of the last moment again
HEARTBEAT_S = 1.0
REVOKE_GRACE_S = 5.0
PURGE_EVERY_S = 120.0
BACK_OFF_S = 0.5  # after an error of the file

log = structlog.get_logger()


class _Subscription:
    """One `deliveries()` call, seen by the worker. `group` None: broadcast, one lease per topic, nothing committed."""

    def __init__(self, topics: Sequence[Topic], group: str | None, inbox: Inbox, member: str) -> None:
        self.topics = {topic.name: topic for topic in topics}
        self.group = group
        self.inbox = inbox
        self.member = member
        self.leases: dict[tuple[str, int], Lease] = {}
        self.started = False
        self.leaving = False
        self.burying: list[tuple[Received, str]] = []
        self.advanced: set[Lease] = set()  # acknowledged since the last commit
        self.read_to: dict[str, int] = {}  # topic -> the tail up to which every lease has read; absent: look

    def gain(self, topic: Topic, part: int, position: int) -> None:
        self.leases[topic.name, part] = Lease(topic, part, position)
        self.read_to.pop(topic.name, None)

    def lose(self, key: tuple[str, int]) -> None:
        lease = self.leases.pop(key)
        lease.live = False
        self.advanced.discard(lease)
        self.inbox.withdraw(lease)

    def acknowledge(self, item: Received) -> None:
        """Safe to repeat. A lease that was lost is not ours to move."""
        if item.lease.live and self.group is not None:
            item.lease.tracker.done(item.offset)
            self.advanced.add(item.lease)

    def uncommitted(self) -> list[Lease]:
        return [lease for lease in self.advanced if lease.tracker.position > lease.committed]


class SqliteBus:
    """See shared.bus.Bus. One object per process serves any number of `deliveries()`."""

    def __init__(
        self,
        path: str | Path,
        *,
        client: str,
        fsync: bool = False,
        lease_s: float = 5.0,
        keep_acknowledged_s: float = 3600.0,
    ) -> None:
        """`fsync` (or `?synchronous=full` after the path): a publish survives a power loss, at a disk flush each."""
        name, _, options = str(path).partition("?")
        if options not in ("", "synchronous=full", "synchronous=normal"):
            raise ValueError(f"bus: option {options!r}; allowed: synchronous=full, synchronous=normal")
        try:
            store = Store(Path(name), fsync=fsync or options == "synchronous=full")
        except (OSError, sqlite3.Error) as error:
            raise BusUnavailable(f"bus file {name}: {error}") from None
        self._worker = _Worker(store, client, lease_s, keep_acknowledged_s)

    async def publish(self, topic: Topic, key: str, message: msgspec.Struct) -> None:
        await self.publish_many([(topic, key, message)])

    async def publish_many(self, items: Sequence[tuple[Topic, str, msgspec.Struct]]) -> None:
        rows = []
        for topic, key, message in items:
            data, headers = codec.encode(topic, message)
            rows.append(Row(topic.name, partition_of(key, topic.partitions), key, data, json.dumps(headers)))
        if rows:
            await asyncio.wrap_future(self._worker.append(rows))

    def deliveries(self, topics: Sequence[Topic], group: str | None, max_in_flight: int) -> Deliveries:
        inbox = Inbox(max_in_flight, self._worker.wake, group)
        self._worker.subscribe(topics, group, inbox)
        return Deliveries(inbox)

    async def lag(self, topics: Sequence[Topic], group: str) -> dict[str, int]:
        names = [topic.name for topic in topics]
        return await asyncio.wrap_future(
            self._worker.call(lambda store: {name: store.lag(group, name) for name in names})
        )

    async def purge(self) -> int:
        """Deletes what nobody needs any more, now instead of at the next turn; returns how many messages."""
        return await asyncio.wrap_future(self._worker.call(self._worker.purge))

    async def close(self) -> None:
        """Writes what was published and settled, leaves every group, ends the iterators."""
        await asyncio.to_thread(self._worker.stop)


class _Worker:
    """The thread that owns the file. Other threads only append to its queues and wake it."""

    def __init__(self, store: Store, client: str, lease_s: float, keep_acknowledged_s: float) -> None:
        self._store = store
        self._process = f"{client}#{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._lease_s = lease_s
        self._keep_s = keep_acknowledged_s
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._appends: list[tuple[list[Row], Future[None]]] = []
        self._calls: list[tuple[Callable[[Store], Any], Future[Any]]] = []
        self._arrivals: list[_Subscription] = []
        self._subscriptions: list[_Subscription] = []
        self._failure: BusUnavailable | None = None
        self._stopping = False
        self._tails: dict[str, int] = {}
        self._seen = store.tail()  # every message up to here is reflected in `_tails` of the topics that are read
        self._tails_stale = True  # there may be messages beyond `_seen`
        self._others = -1  # the store's counter of other processes' commits, at the last look
        self._membership = -1
        self._next_heartbeat = 0.0
        self._next_commit = 0.0
        self._next_purge = time.monotonic() + PURGE_EVERY_S
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
            self._arrivals.append(_Subscription(topics, group, inbox, member))
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
            everyone = self._subscriptions + self._arrivals
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
        self._subscriptions += arrivals
        try:
            moved = self._look_at_others()
            left = self._collect_settled()
            beat = moved or left or last or bool(arrivals) or now >= self._next_heartbeat
            self._write(appends, now, beat=beat, commit=bool(appends or calls) or now >= self._next_commit, last=last)
            if not last:
                self._look_for_messages(published=bool(appends))
                self._purge_in_turn(now)
        except sqlite3.Error as error:
            self._membership = -1  # compare what is held with what the file says
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

    def purge(self, store: Store) -> int:
        deleted = store.purge(self._keep_s)
        if deleted:
            log.info("bus.purged", messages=deleted)
        return deleted

    def _purge_in_turn(self, now: float) -> None:
        if now >= self._next_purge:
            self._next_purge = now + PURGE_EVERY_S
            if self._store.purge_due(PURGE_EVERY_S):
                self.purge(self._store)

    def _look_at_others(self) -> bool:
        """True if the members or owners of some group have changed since this process looked."""
        others = self._store.changed_by_others()
        if others == self._others:
            return False
        self._others = others
        self._tails_stale = True
        return bool(self._subscriptions) and self._store.membership() != self._membership

    def _collect_settled(self) -> bool:
        """Moves the trackers. True if a subscription has begun to leave."""
        left = False
        for subscription in self._subscriptions:
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
        buried = [(s, *entry) for s in self._subscriptions for entry in s.burying]
        for subscription, item, _ in buried:
            subscription.acknowledge(item)
        moved = [(s, leases) for s in self._subscriptions if commit and (leases := s.uncommitted())]
        if not (appends or buried or moved or beat):
            return
        with self._store.write():
            for rows, _ in appends:
                self._store.append(rows)
            self._append_dead_letters(buried)
            for subscription, leases in moved:
                self._commit(subscription, leases)
            if beat:
                self._beat(now, last)
        for _, future in appends:
            _resolve(future, None, None)
        for subscription, *_ in buried:
            subscription.burying.clear()
        for subscription, leases in moved:
            for lease in leases:
                lease.committed = lease.tracker.position
            subscription.advanced.clear()
        self._next_commit = now + COMMIT_EVERY_S
        self._tails_stale = self._tails_stale or bool(appends)

    def _append_dead_letters(self, buried: list[tuple[_Subscription, Received, str]]) -> None:
        for subscription, item, reason in buried:
            source = f"{item.topic.name}/{item.offset}/{subscription.group or ''}"
            if self._store.has_dead_letter(item.topic.dead_letter, source):
                continue
            headers = {**item.headers, "dead-letter-reason": reason, "dead-letter-source": source}
            self._store.append([Row(item.topic.dead_letter, 0, item.key, item.data, json.dumps(headers))])
            log.warning("bus.buried", topic=item.topic.name, offset=item.offset, key=item.key, reason=reason)

    def _commit(self, subscription: _Subscription, leases: list[Lease]) -> None:
        if subscription.group is not None:
            positions = [(lease.topic.name, lease.partition, lease.tracker.position) for lease in leases]
            self._store.commit(subscription.group, positions, subscription.member)

    # Membership.

    def _beat(self, now: float, last: bool) -> None:
        """Says that this process lives, and moves every subscription towards its share. Inside the transaction."""
        self._next_heartbeat = now + HEARTBEAT_S
        present = self._store.heartbeat(self._process, time.time() + self._lease_s)
        for subscription in self._subscriptions:
            if not subscription.started:
                self._start(subscription)
            elif subscription.group is not None and subscription.member not in present:
                log.warning("bus.lease_lost", group=subscription.group, member=subscription.member)
                for key in list(subscription.leases):
                    subscription.lose(key)
                self._join(subscription, subscription.group)
        for member in self._store.dead(time.time()):
            self._store.leave(member)
        before, self._membership = self._membership, self._store.membership()
        look = last or self._membership != before
        for subscription in list(self._subscriptions):
            if subscription.group is None:
                if subscription.leaving or last:
                    self._remove(subscription)
                continue
            if look or subscription.leaving or any(x.revoke_by is not None for x in subscription.leases.values()):
                self._rebalance(subscription, subscription.group, now, last)
            if last or (subscription.leaving and not subscription.leases):
                self._store.leave(subscription.member)
                self._remove(subscription)
        if self._store.membership() != self._membership:  # what we changed may have changed our own share: look again
            self._next_heartbeat = now

    def _start(self, subscription: _Subscription) -> None:
        for topic in subscription.topics.values():
            self._store.know(topic, broadcast=subscription.group is None)
            self._tails[topic.name] = self._store.tail(topic.name)
            if subscription.group is None:
                subscription.gain(topic, -1, 0)
        if subscription.group is not None:
            self._join(subscription, subscription.group)
        subscription.started = True

    def _join(self, subscription: _Subscription, group: str) -> None:
        expires = time.time() + self._lease_s
        self._store.join(subscription.member, self._process, group, list(subscription.topics), expires)

    def _remove(self, subscription: _Subscription) -> None:
        for key in list(subscription.leases):
            subscription.lose(key)
        self._subscriptions.remove(subscription)
        subscription.inbox.close()

    def _rebalance(self, subscription: _Subscription, group: str, now: float, last: bool) -> None:
        me = subscription.member
        for name, topic in subscription.topics.items():
            owners = self._store.owners(group, name)
            mine = {part: lease for (of, part), lease in subscription.leases.items() if of == name}
            for part in [part for part in mine if owners.get(part) != me]:  # somebody took us for dead
                subscription.lose((name, part))
                del mine[part]
            forgotten = [part for part, owner in owners.items() if owner == me and part not in mine]
            if subscription.leaving or last:
                release: tuple[int, ...] = tuple(mine)
                self._store.release(group, name, forgotten, me)
            else:
                change = share(topic.partitions, owners, self._store.members(group, name), me)
                release = tuple(part for part in change.release if part in mine)
                gained = [
                    *forgotten,
                    *change.take,
                ]  # forgotten: a transaction that failed after we had changed our mind
                for part, position in self._store.take(group, name, gained, me).items():
                    subscription.gain(topic, part, position)
                if change.take:
                    self._store.announce()
            for part in set(mine) - set(release):
                self._keep(subscription, mine[part])
            self._hand_back(subscription, group, [mine[part] for part in release], now, last)

    def _keep(self, subscription: _Subscription, lease: Lease) -> None:
        """Ends a revocation that is no longer wanted: what was withdrawn is read again."""
        if lease.revoke_by is not None:
            position = lease.tracker.position
            subscription.lose((lease.topic.name, lease.partition))
            subscription.gain(lease.topic, lease.partition, position)

    def _hand_back(
        self, subscription: _Subscription, group: str, leases: list[Lease], now: float, at_once: bool
    ) -> None:
        released: dict[str, list[Lease]] = {}
        for lease in leases:
            lease.revoke_by = lease.revoke_by or now + REVOKE_GRACE_S
            in_flight = subscription.inbox.withdraw(lease)
            if in_flight and now < lease.revoke_by and not at_once:
                self._next_heartbeat = min(self._next_heartbeat, now + POLL_IDLE_S)
            else:
                released.setdefault(lease.topic.name, []).append(lease)
        for name, gone in released.items():
            self._commit(subscription, gone)
            self._store.release(group, name, [lease.partition for lease in gone], subscription.member)
            for lease in gone:
                subscription.lose((name, lease.partition))
        if released:
            self._store.announce()

    # Reading.

    def _look_for_messages(self, *, published: bool) -> None:
        if self._tails_stale:
            self._tails_stale = False
            fresh = self._store.tails(self._seen)
            self._tails.update(fresh)
            self._seen = max([self._seen, *fresh.values()])
        came = sum(self._fill(subscription) for subscription in self._subscriptions)
        busy = bool(came or published)
        self._poll_s = POLL_BUSY_S if busy else min(POLL_IDLE_S, self._poll_s * 1.5)

    def _fill(self, subscription: _Subscription) -> int:
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
        self, subscription: _Subscription, topic: Topic, leases: list[Lease], first: int, tail: int, room: int
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
            if subscription.group is not None:
                lease.tracker.give(row.offset)
            item = Received(subscription.inbox, lease, row.key, None, headers, row.offset, row.value)
            try:
                item.message = codec.decode(topic, row.value, headers)
            except codec.UnreadableMessage as error:
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
