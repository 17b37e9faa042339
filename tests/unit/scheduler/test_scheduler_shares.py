"""Slots follow the shares of the runs that use them: the rule alone, on workers that take what was asked for in its order."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.shares import STALLED_S, Accounts, Demand

LOOK_S = 1.0


@dataclass
class Tenant:
    """A run that could always use more slots, from `joins` until `leaves`. `idle`: it asks for nothing then."""

    share: float
    lasts: Callable[[random.Random], float]
    group_size: int = 4
    joins: float = 0.0
    leaves: float = float("inf")
    idle: Callable[[float], bool] = lambda now: False
    queued: deque[float] = field(default_factory=deque)  # when each was asked for
    taken: dict[Hashable, float] = field(default_factory=dict)
    taken_at: float = 0.0

    def here(self, now: float) -> bool:
        return self.joins <= now < self.leaves

    def demand(self, now: float) -> Demand:
        return Demand(
            share=self.share,
            groups=0 if self.idle(now) else 1000,
            group_size=self.group_size,
            queued=len(self.queued),
            waits_since=min(self.queued, default=None),
            taken=dict(self.taken),
            taken_at=self.taken_at,
        )


class Fleet:
    """Slots, and one queue for all. `used`: slot-seconds of each run since `since`, second by second."""

    def __init__(self, slots: int, seed: int = 0, **tenants: Tenant) -> None:
        self.slots, self.tenants, self.random = slots, tenants, random.Random(seed)
        self.accounts = Accounts()
        self.now, self.count = 0.0, 0
        self.queue: deque[str] = deque()
        self.ends: list[tuple[float, str, int]] = []
        self.used: dict[str, float] = defaultdict(float)
        self.empty = 0.0  # slot-seconds in which a slot was empty

    def run(self, seconds: float) -> Fleet:
        for _ in range(int(seconds / LOOK_S)):
            self._look()
        return self

    def shares(self, *names: str) -> dict[str, float]:
        of = names or tuple(self.tenants)
        total = sum(self.used[name] for name in of) or 1.0
        return {name: self.used[name] / total for name in of}

    def from_now(self) -> Fleet:
        self.used.clear()
        self.empty = 0.0
        return self

    def _look(self) -> None:
        here = {name: tenant for name, tenant in self.tenants.items() if tenant.here(self.now)}
        for name in self.tenants.keys() - here.keys():  # a run that stops: its attempts are dropped
            self.tenants[name].queued.clear()
            self.tenants[name].taken.clear()
        self.queue = deque(name for name in self.queue if name in here)
        while self.ends and self.ends[0][0] <= self.now:
            _, name, number = heapq.heappop(self.ends)
            self.tenants[name].taken.pop(number, None)
        held = sum(len(tenant.taken) for tenant in here.values())
        largest = max((tenant.group_size for tenant in here.values()), default=0)
        demands = {name: tenant.demand(self.now) for name, tenant in here.items()}
        for name, groups in self.accounts.divide(demands, self.now, max(4 * largest, held // 2)).items():
            for _ in range(groups * self.tenants[name].group_size):
                self.queue.append(name)
                self.tenants[name].queued.append(self.now)
        while self.queue and held < self.slots:
            name = self.queue.popleft()
            tenant = self.tenants[name]
            tenant.queued.popleft()
            self.count, held, tenant.taken_at = self.count + 1, held + 1, self.now
            tenant.taken[self.count] = self.now
            heapq.heappush(self.ends, (self.now + max(LOOK_S, tenant.lasts(self.random)), name, self.count))
        for name, tenant in here.items():
            self.used[name] += len(tenant.taken) * LOOK_S
        self.empty += (self.slots - held) * LOOK_S
        self.now += LOOK_S


def about(mean: float) -> Callable[[random.Random], float]:
    return lambda r: r.uniform(0.5 * mean, 1.5 * mean)


def heavy(mean: float) -> Callable[[random.Random], float]:
    """Pareto's with index 1.5, cut off at twenty times the mean."""
    return lambda r: min(20 * mean, mean / 3 * r.paretovariate(1.5))


durations = st.builds(lambda kind, mean: kind(mean), st.sampled_from([about, heavy]), st.floats(4, 60))
tenants = st.builds(Tenant, st.floats(0.2, 5), durations, st.integers(2, 8))


def near(fleet: Fleet, within: float = 0.05) -> None:
    total = sum(tenant.share for tenant in fleet.tenants.values())
    found = fleet.shares()
    for name, tenant in fleet.tenants.items():
        assert found[name] == pytest.approx(tenant.share / total, abs=within), found


@settings(max_examples=8, deadline=None)
@given(st.lists(tenants, min_size=2, max_size=4), st.integers(16, 64), st.integers(0, 1000))
def test_slots_follow_the_shares_however_long_attempts_take(runs: list[Tenant], slots: int, seed: int) -> None:
    near(Fleet(slots, seed, **{f"r{i}": run for i, run in enumerate(runs)}).run(4000))


@settings(max_examples=6, deadline=None)
@given(st.lists(tenants, min_size=2, max_size=3), st.integers(16, 48), st.integers(0, 1000))
def test_no_slot_is_empty_while_a_run_could_use_it(runs: list[Tenant], slots: int, seed: int) -> None:
    fleet = Fleet(slots, seed, **{f"r{i}": run for i, run in enumerate(runs)}).run(100).from_now().run(1000)
    assert fleet.empty <= 0.05 * 1000 * slots  # the queue of four groups may run dry between two looks


def test_a_small_share_is_not_starved() -> None:
    fleet = Fleet(8, small=Tenant(0.01, about(20)), large=Tenant(1.0, about(20))).run(10_000)
    assert fleet.shares()["small"] == pytest.approx(0.01 / 1.01, abs=0.005)


def test_the_share_of_a_run_that_asks_for_nothing_goes_to_the_others_and_it_is_owed_nothing_for_that() -> None:
    idle = Tenant(7, about(10), idle=lambda now: 1000 <= now < 3000)
    fleet = Fleet(32, a=idle, b=Tenant(3, about(10))).run(1100).from_now().run(1900)
    assert fleet.shares()["b"] > 0.99
    fleet.run(50).from_now().run(200)  # back, and at once with its share: not with all
    assert fleet.shares()["a"] == pytest.approx(0.7, abs=0.05)


@settings(max_examples=4, deadline=None)
@given(durations, durations, durations, st.integers(0, 1000))
def test_a_run_that_joins_gets_its_share_and_no_more_for_the_time_before_and_frees_it_when_it_leaves(
    a: Callable[[random.Random], float],
    b: Callable[[random.Random], float],
    c: Callable[[random.Random], float],
    seed: int,
) -> None:
    third = Tenant(10, c, joins=1000, leaves=5000)
    fleet = Fleet(32, seed, a=Tenant(7, a), b=Tenant(3, b), c=third).run(1000)
    fleet.from_now().run(4000)
    assert fleet.shares()["c"] == pytest.approx(0.5, abs=0.05)
    assert fleet.shares("a", "b")["a"] == pytest.approx(0.7, abs=0.06)
    fleet.from_now().run(4000)
    assert fleet.used["c"] == 0
    assert fleet.shares("a", "b")["a"] == pytest.approx(0.7, abs=0.05)


def test_shares_hold_after_the_accounts_were_lost() -> None:
    fleet = Fleet(32, a=Tenant(7, about(20)), b=Tenant(3, heavy(20)))
    for _ in range(20):
        fleet.run(200)
        fleet.accounts = Accounts()
    near(fleet)


def test_a_share_that_changes_holds_from_then_on() -> None:
    fleet = Fleet(32, a=Tenant(7, about(20)), b=Tenant(3, about(20))).run(3000)
    fleet.tenants["a"].share = 1
    fleet.run(60).from_now().run(3000)
    near(fleet)


def test_a_run_that_no_worker_takes_anything_of_does_not_fill_the_queue_for_the_others() -> None:
    stuck = Demand(share=1, groups=1000, group_size=4, queued=16, waits_since=10.0, taken={}, taken_at=0.0)
    other = Demand(share=1, groups=1000, group_size=4, queued=0, waits_since=None, taken={}, taken_at=30.0)
    accounts = Accounts()
    assert accounts.divide({"stuck": stuck, "other": other}, 40.0, 16) == {"stuck": 0, "other": 0}
    later = Demand(share=1, groups=1000, group_size=4, queued=0, waits_since=None, taken={}, taken_at=11 + STALLED_S)
    assert accounts.divide({"stuck": stuck, "other": later}, 80.0, 16) == {"stuck": 0, "other": 4}


def test_a_smaller_group_does_not_overtake_a_larger_one_without_end() -> None:
    """There is room for the small run's group all the while; it waits until that of the large one fits."""

    def demand(size: int, queued: int, taken: Iterable[int] = ()) -> Demand:
        held: dict[Hashable, float] = dict.fromkeys(taken, 0.0)
        return Demand(share=1, groups=1000, group_size=size, queued=queued, waits_since=0.0, taken=held, taken_at=1.0)

    accounts = Accounts()
    granted = accounts.divide({"large": demand(32, 0), "small": demand(2, 110, range(40))}, 1.0, 128)
    assert granted == {"large": 0, "small": 0}
