"""Rules of pacing: the shipped gate's, variants of it, and those of other systems.

- `Paced`: `services.scheduler.gate` and `pacing`. Nothing is thrown away. `desk.Shipped` is the whole scheduler.
- `Ahead`, `Oldest`: variants that show what each half of it does.
- `Synchronous`: sample, then train, then sample: verl's and TRL's default. Always of age 0.
- `DropStale`: every slot is always busy; what is too old when a step begins is thrown away (prime-rl, `max_off_policy_steps`).
- `Capacity`: AReaL (arXiv 2505.24298, equation 3): so many groups are asked for that, if they were trained in order, none was
  older than the bound: N <= (version + bound + 1) * groups_per_step. What is too old in spite of that is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from services.scheduler import pacing
from services.scheduler.gate import Gate
from services.scheduler.simulation.fleet import Attempt, Group, Rule, View, What


class _Quiet:
    """A rule that sees all that it needs in the view."""

    name = ""

    def heard(self, view: View, attempt: Attempt, what: What) -> None:
        pass

    def stepped(self, view: View, groups: list[Group]) -> None:
        pass

    def swapped(self, view: View) -> None:
        pass

    def first(self, view: View) -> tuple[list[Group], list[Group]]:
        """A step of those that waited longest; what is too old for it is thrown away."""
        size, bound = view.fleet.groups_per_step, view.fleet.max_staleness
        thrown = [g for g in view.waiting.values() if view.step - g.oldest(view.step) > bound]
        fine = [g for g in view.waiting.values() if g not in thrown]
        return (fine[:size] if len(fine) >= size else []), thrown

    def ahead(self, view: View) -> int:
        """Groups that free slots could begin now: every rule asks for no more than a slot can take up."""
        free = view.fleet.slots - view.busy - view.waits
        return max(0, -(-free // view.fleet.group_size))

    def within_bound(self, view: View) -> int:
        """Groups that slots could begin and that, trained in order, would not be older than the bound."""
        places = (view.version + view.fleet.max_staleness + 1) * view.fleet.groups_per_step
        return max(0, min(places - view.taken - len(view.waiting) - len(view.running), self.ahead(view)))


class Synchronous(_Quiet):
    name = "synchronous"

    def opens(self, view: View) -> int:
        idle = not view.running and not view.waiting and not view.training and view.version == view.step
        return view.fleet.groups_per_step if idle else 0

    def batch(self, view: View) -> tuple[list[Group], list[Group]]:
        return ([], []) if view.running else self.first(view)


class DropStale(_Quiet):
    name = "drop what is stale"

    def opens(self, view: View) -> int:
        return self.ahead(view)

    def batch(self, view: View) -> tuple[list[Group], list[Group]]:
        return self.first(view)


class Capacity(_Quiet):
    name = "capacity (AReaL)"

    def opens(self, view: View) -> int:
        return self.within_bound(view)

    def batch(self, view: View) -> tuple[list[Group], list[Group]]:
        return self.first(view)


class Paced(_Quiet):
    """Ours. A group is complete before it gets its place; the trainer takes groups in the order of their places."""

    name = "étude"

    def __init__(self) -> None:
        self.placed: dict[int, Group] = {}  # groups with a place that no step has taken
        self.began: dict[int, float] = {}  # groups without one -> when they were asked for
        self.latencies_s: deque[float] = deque(maxlen=pacing.LATENCIES)

    def heard(self, view: View, attempt: Attempt, what: What) -> None:
        group = attempt.group
        if what == "asked":
            self.began.setdefault(group.number, view.now)
        elif what == "ended" and group.complete:
            self.latencies_s.append(view.now - self.began.pop(group.number))

    def lead(self, view: View) -> int:
        """See `pacing.lead`."""
        size, bound = view.fleet.groups_per_step, view.fleet.max_staleness
        step_s = view.fleet.step_s if view.step else None
        return pacing.lead(self.latencies_s, step_s, groups_per_step=size, max_staleness=bound)

    def opens(self, view: View) -> int:
        gate = Gate(view.fleet.max_staleness, view.fleet.groups_per_step)
        standing = self._place(view, gate)
        accepted = view.taken + len(self.placed)
        room = gate.room(version=view.version, standing=standing, accepted=accepted, lead=self.lead(view))
        return min(room, self.ahead(view))

    def batch(self, view: View) -> tuple[list[Group], list[Group]]:
        self._place(view, Gate(view.fleet.max_staleness, view.fleet.groups_per_step))
        numbers = list(self.placed)[: view.fleet.groups_per_step]
        if len(numbers) < view.fleet.groups_per_step:
            return [], []
        return [self.placed.pop(number) for number in numbers], []

    def _place(self, view: View, gate: Gate) -> list[int]:
        """Give complete groups their places. Return the oldest versions of the groups that are left, rising."""
        complete = [group for number, group in view.waiting.items() if number not in self.placed]
        groups = sorted((*complete, *view.running.values()), key=lambda group: group.oldest(view.version))
        standing = [(group.oldest(view.version), group.complete) for group in groups]
        taken = set(gate.placing(standing, accepted=view.taken + len(self.placed)) if complete else ())
        self.placed.update((group.number, group) for i, group in enumerate(groups) if i in taken)
        return [oldest for i, (oldest, _) in enumerate(standing) if i not in taken]


class Ahead(Paced):
    """Ours, but it asks for as many groups as the bound allows instead of as many as keep the trainer busy."""

    name = "as far ahead as allowed"

    def lead(self, view: View) -> int:
        return view.fleet.max_staleness * view.fleet.groups_per_step


class Oldest(_Quiet):
    """A simpler rule that keeps the bound: no reservation. A new group is asked for only while everything unfinished fits into
    the places of the oldest version of all, so one slow attempt stops all sampling."""

    name = "paced by the oldest"

    def opens(self, view: View) -> int:
        oldest = min((group.oldest(view.version) for group in view.running.values()), default=view.version)
        places = (min(view.version, oldest) + view.fleet.max_staleness + 1) * view.fleet.groups_per_step
        return max(0, min(places - view.taken - len(view.waiting) - len(view.running), self.ahead(view)))

    def batch(self, view: View) -> tuple[list[Group], list[Group]]:
        size = view.fleet.groups_per_step
        return (list(view.waiting.values())[:size] if len(view.waiting) >= size else []), []


ALTERNATIVES: tuple[Callable[[], Rule], ...] = (Synchronous, DropStale, Capacity)
