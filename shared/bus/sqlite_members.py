"""Who reads what on this machine: the subscriptions of one process, their leases, and their part in every rebalance.

Called by the bus worker inside its transactions. A partition that moves is given no new deliveries, and changes hands when
what is in flight is settled, after REVOKE_GRACE_S in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from shared.bus.assignment import share
from shared.bus.inbox import Inbox, Lease, Received
from shared.bus.sqlite_store import Position, Store
from shared.bus.tracking import read_ranges
from shared.contracts.topics import Topic

HEARTBEAT_S = 1.0
REVOKE_GRACE_S = 5.0
LOOK_AGAIN_S = 0.05  # while a partition that moves has deliveries in flight

log = structlog.get_logger()


class Subscription:
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
        self.past: dict[str, int] | None = None  # without a group: topic -> its tail at the start, until that was read
        self.read_to: dict[str, int] = {}  # topic -> the tail up to which every lease has read; absent: look

    def gain(self, topic: Topic, part: int, position: int, finished: Iterable[int] = ()) -> None:
        self.leases[topic.name, part] = Lease(topic, part, position, finished)
        self.read_to.pop(topic.name, None)

    def lose(self, key: tuple[str, int]) -> None:
        lease = self.leases.pop(key)
        lease.live = False
        self.advanced.discard(lease)
        self.inbox.withdraw(lease)

    def look_back(self) -> None:
        """Says so, once what was there at the start has been read."""
        past = self.past
        if past is not None and self.leases and all(x.read > past[x.topic.name] for x in self.leases.values()):
            self.past = None
            self.inbox.past_read()

    def acknowledge(self, item: Received) -> None:
        """Safe to repeat. A lease that was lost is not ours to move."""
        if item.lease.live and self.group is not None:
            item.lease.tracker.done(item.offset)
            self.advanced.add(item.lease)

    def uncommitted(self) -> dict[Lease, Position]:
        stands = {lease: Position(*lease.standing()) for lease in self.advanced}
        return {lease: at for lease, at in stands.items() if at != (lease.committed, lease.noted)}


class Membership:
    """`know` is told the name of every topic that is read from now on."""

    def __init__(self, store: Store, process: str, lease_s: float, know: Callable[[str], None]) -> None:
        self.subscriptions: list[Subscription] = []
        self.next_heartbeat = 0.0  # monotonic
        self._store, self._process, self._lease_s, self._know = store, process, lease_s, know
        self._seen = -1  # the membership counter at the last look

    def changed(self) -> bool:
        """Whether the members or owners of some group have changed since this process looked."""
        return bool(self.subscriptions) and self._store.membership() != self._seen

    def forget(self) -> None:
        """After a failed transaction: what is held is compared with what the file says."""
        self._seen = -1

    def commit(self, subscription: Subscription, stands: Mapping[Lease, Position]) -> None:
        if subscription.group is not None:
            positions = [(lease.topic.name, lease.partition, at) for lease, at in stands.items()]
            self._store.commit(subscription.group, positions, subscription.member)

    def beat(self, now: float, last: bool) -> None:
        """Says that this process lives, and moves every subscription towards its share. Inside the transaction."""
        self.next_heartbeat = now + HEARTBEAT_S
        present = self._store.heartbeat(self._process, time.time() + self._lease_s)
        for subscription in self.subscriptions:
            if not subscription.started:
                self._start(subscription)
            elif subscription.group is not None and subscription.member not in present:
                log.warning("bus.lease_lost", group=subscription.group, member=subscription.member)
                for key in list(subscription.leases):
                    subscription.lose(key)
                self._join(subscription, subscription.group)
        for member in self._store.dead(time.time()):
            self._store.leave(member)
        before, self._seen = self._seen, self._store.membership()
        look = last or self._seen != before
        for subscription in list(self.subscriptions):
            if subscription.group is None:
                if subscription.leaving or last:
                    self._remove(subscription)
                continue
            if look or subscription.leaving or any(x.revoke_by is not None for x in subscription.leases.values()):
                self._rebalance(subscription, subscription.group, now, last)
            if last or (subscription.leaving and not subscription.leases):
                self._store.leave(subscription.member)
                self._remove(subscription)
        if self._store.membership() != self._seen:  # what we changed may have changed our own share: look again
            self.next_heartbeat = now

    def _start(self, subscription: Subscription) -> None:
        if subscription.group is None:
            subscription.past = {name: self._store.tail(name) for name in subscription.topics}
        for topic in subscription.topics.values():
            self._store.know(topic, keep=subscription.group is None or topic.holds_letters)
            self._know(topic.name)
            if subscription.group is None:
                subscription.gain(topic, -1, 0)
        if subscription.group is not None:
            self._join(subscription, subscription.group)
        subscription.started = True

    def _join(self, subscription: Subscription, group: str) -> None:
        expires = time.time() + self._lease_s
        self._store.join(subscription.member, self._process, group, list(subscription.topics), expires)

    def _remove(self, subscription: Subscription) -> None:
        for key in list(subscription.leases):
            subscription.lose(key)
        self.subscriptions.remove(subscription)
        subscription.inbox.close()

    def _rebalance(self, subscription: Subscription, group: str, now: float, last: bool) -> None:
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
                for part, at in self._store.take(group, name, gained, me).items():
                    subscription.gain(topic, part, at.offset, read_ranges(at.offset, at.finished))
                if change.take:
                    self._store.announce()
            for part in set(mine) - set(release):
                self._keep(subscription, mine[part])
            self._hand_back(subscription, group, [mine[part] for part in release], now, last)

    def _keep(self, subscription: Subscription, lease: Lease) -> None:
        """Ends a revocation that is no longer wanted: what was withdrawn is read again."""
        if lease.revoke_by is not None:
            position = lease.tracker.position
            finished = [o for first, last in lease.tracker.finished() for o in range(first, last + 1)]
            subscription.lose((lease.topic.name, lease.partition))
            subscription.gain(lease.topic, lease.partition, position, finished)
            again = subscription.leases[lease.topic.name, lease.partition]
            again.committed, again.noted = lease.committed, lease.noted
            subscription.advanced.add(again)

    def _hand_back(
        self, subscription: Subscription, group: str, leases: list[Lease], now: float, at_once: bool
    ) -> None:
        released: dict[str, list[Lease]] = {}
        for lease in leases:
            lease.revoke_by = lease.revoke_by or now + REVOKE_GRACE_S
            in_flight = subscription.inbox.withdraw(lease)
            if in_flight and now < lease.revoke_by and not at_once:
                self.next_heartbeat = min(self.next_heartbeat, now + LOOK_AGAIN_S)
            else:
                released.setdefault(lease.topic.name, []).append(lease)
        for name, gone in released.items():
            self.commit(subscription, {lease: Position(*lease.standing()) for lease in gone})
            self._store.release(group, name, [lease.partition for lease in gone], subscription.member)
            for lease in gone:
                subscription.lose((name, lease.partition))
        if released:
            self._store.announce()
