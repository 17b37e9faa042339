"""Which replica serves which attempt. Pure: no clock, no I/O; whoever calls says what time it is.

Invariants:
- All attempts of a group go to one replica while it is usable (rendezvous hashing), so that their prompt is computed once.
- A replica is used only while it is in rotation (policies.applied), alive (probed) and its circuit is closed. Where there is
  none, one that left the rotation is used that still holds a version whole: no attempt's floor lies above what it serves.
- One that says that it has no room for more is alive: it is passed over until it may be asked again, where others can serve.
- Nothing below an attempt's policy floor serves it; a pinned attempt is served by exactly its version.
- Replicas of the pool "serving" answer others: no attempt goes there.
- One that is gone for good is forgotten; never one that could come back without a word.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from shared.contracts.messages import GONE_S, MUTE_S, PolicyApplied

OPEN_AFTER = 3  # failures in a row before a replica is left alone: one lost connection is no outage
FIRST_REST_S, LAST_REST_S = 0.5, 10.0
TRIAL_S = 1.0  # what has not failed by then is being computed, and the next one may follow
SILENT_S = 5.0  # before the scheduler is told: an engine that is only busy has answered by then
LAST_PROBE_S = 2.0  # a replica that comes back is noticed within so long


@dataclass(slots=True)
class Circuit:
    """Closed: requests pass. Open: none until the rest is over; then one tries, and another one every TRIAL_S, until one
    succeeds and closes it, or fails and doubles the rest at once. Failures during a rest are those of requests sent before: one
    outage, not many."""

    failures: int = 0
    rest_until: float = 0.0
    rest_s: float = FIRST_REST_S
    trial_until: float = 0.0

    def allows(self, now: float) -> bool:
        return now >= max(self.rest_until, self.trial_until)

    def sent(self, now: float) -> None:
        """A request is on its way."""
        if self.failures >= OPEN_AFTER:
            self.trial_until = now + TRIAL_S

    def succeeded(self) -> None:
        self.failures, self.rest_until, self.rest_s, self.trial_until = 0, 0.0, FIRST_REST_S, 0.0

    def failed(self, now: float) -> None:
        if now < self.rest_until:
            return
        self.failures += 1
        if self.failures >= OPEN_AFTER:
            self.rest_until, self.rest_s = now + self.rest_s, min(LAST_REST_S, self.rest_s * 2)


@dataclass(slots=True)
class Probe:
    """When to ask next whether a replica lives. One that does not answer is asked ever more rarely, until it is forgotten."""

    running: bool = False
    after: float = 0.0
    rest_s: float = FIRST_REST_S

    def answered(self, alive: bool, now: float) -> None:
        self.running = False
        self.after, self.rest_s = (
            (0.0, FIRST_REST_S) if alive else (now + self.rest_s, min(LAST_PROBE_S, self.rest_s * 2))
        )


@dataclass(slots=True)
class Replica:
    name: str
    run: str
    url: str
    pool: str
    serial: int
    in_rotation: bool = True
    standby: bool = False  # out of rotation, and can still answer with `serial`
    alive: bool = False  # until the first probe
    last_answer: float = float("-inf")
    last_word: float = float("-inf")
    probe: Probe = field(default_factory=Probe)
    circuit: Circuit = field(default_factory=Circuit)
    saturated_until: float = float("-inf")

    def saturated(self, now: float) -> bool:
        return now < self.saturated_until

    def usable(self, now: float) -> bool:
        return (self.in_rotation or self.standby) and self.alive and self.circuit.allows(now)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an attempt may be served by. `first`: the oldest version of its first tokens, which a replica out of rotation must not
    fall below: the scheduler reckons with the oldest version that an attempt has reported and with the replicas in rotation.
    `spare`: nothing trains at the moment, so that an evaluation may use the replicas of the rollout pool beside its own."""

    run: str
    group: str
    floor: int
    pinned: int | None = None
    spare: bool = False
    first: int = -1

    def accepts(self, serial: int) -> bool:
        return serial == self.pinned if self.pinned is not None else serial >= self.floor


class Fleet:
    """The replicas, as far as this worker knows."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}

    def apply(self, message: PolicyApplied, now: float = 0.0) -> None:
        """A replica that takes over the address of another one replaces it: it is the same place, started again."""
        for name in [r.name for r in self.replicas.values() if r.url == message.url and r.name != message.replica]:
            del self.replicas[name]
        if message.pool == "serving":  # not ours to ask, nor to wait for
            self.replicas.pop(message.replica, None)
            return
        known = self.replicas.get(message.replica)
        if known is None or known.url != message.url:
            known = Replica(message.replica, message.run, message.url, message.pool, message.serial)
            self.replicas[message.replica] = known
        known.run, known.pool, known.last_word = message.run, message.pool, now
        known.probe.after = 0.0  # it speaks: look at once whether it answers, too
        known.in_rotation = message.ok
        known.standby = not message.ok and message.serving >= 0
        if message.ok or known.standby:
            known.serial = message.serial if message.ok else message.serving

    def choose(self, wanted: Wanted, now: float, stay: str = "") -> Replica | None:
        """The replica for this attempt, None while there is none; a saturated one only where all are. `stay`: the one that holds
        its KV, kept if possible."""
        ours = (r for r in self.replicas.values() if r.run == wanted.run)
        able = [r for r in ours if wanted.accepts(r.serial) and r.usable(now)]
        able = [r for r in able if r.in_rotation or r.serial >= wanted.first]
        if wanted.pinned is None:
            able = [r for r in able if r.pool == "rollout"]
        elif not wanted.spare:
            able = [r for r in able if r.pool == "evaluation"] or able
        able = [r for r in able if r.in_rotation] or able
        able = [r for r in able if not r.saturated(now)] or able
        for replica in able:
            if replica.name == stay:
                return replica
        return max(able, key=lambda r: xxhash.xxh3_64_intdigest(f"{wanted.group}|{r.name}".encode()), default=None)

    def any_usable(self, now: float) -> bool:
        return any(r.usable(now) for r in self.replicas.values())

    def silent(self, now: float) -> dict[str, list[str]]:
        """By run, names of replicas in rotation that have answered nothing for SILENT_S."""
        found: dict[str, list[str]] = {}
        for r in self.replicas.values():
            quiet = not r.alive and now - max(r.last_answer, r.last_word) > SILENT_S
            if quiet and r.in_rotation and r.pool == "rollout":
                found.setdefault(r.run, []).append(r.name)
        return found

    def forget(self, now: float) -> None:
        """Forget the replicas that are gone for good.

        A killed replica sends no message, and each worker that starts reads its last message again. A live replica
        sends one when it serves a newer version and when it returns to the rotation. So a replica that lags behind the
        others or is out of rotation is forgotten after GONE_S of silence. Any other may be alive with nothing to
        report. It is forgotten after MUTE_S, and only while another replica is alive: if none is, the network may be
        cut, and they return without a message.
        """
        newest: dict[str, int] = {}
        for r in self.replicas.values():
            if r.pool == "rollout" and r.in_rotation:
                newest[r.run] = max(newest.get(r.run, r.serial), r.serial)
        others = any(r.alive for r in self.replicas.values())
        for r in list(self.replicas.values()):
            silent_s = now - max(r.last_answer, r.last_word)
            overtaken = r.pool == "rollout" and r.serial < newest.get(r.run, r.serial)
            speaks = overtaken or not r.in_rotation
            if not r.alive and ((speaks and silent_s > GONE_S) or (others and silent_s > MUTE_S)):
                del self.replicas[r.name]

    def to_probe(self, now: float, silent_s: float) -> list[Replica]:
        """Replicas that have not answered anything for so long: whoever talks needs no probe."""
        return [
            r
            for r in self.replicas.values()
            if not r.probe.running and now >= r.probe.after and now - r.last_answer >= silent_s
        ]
