"""Which inference replicas serve a run, and which are gone for good. Pure.

A dead replica says nothing more, and on some clusters its name never comes again. So whatever is kept of one has an end:
it leaves the rotation, then it is forgotten. Its next word, if it lives after all, brings it back.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from services.scheduler.records import ReplicaState
from shared.contracts.messages import GONE_S, MUTE_S

Policies = Mapping[int, tuple[int, int, float]]  # serial -> (incarnation, step, published at)
Replicas = Mapping[str, ReplicaState]
SILENT_S = 5.0  # for one that lives and is busy to answer, and to take a version


class _Published:
    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._serials = sorted(policies)  # as they came, so already in order; a scan for each replica would not be

    def waits_since(self, replica: ReplicaState) -> float | None:
        """Since when a version waits for this replica; None: it has the newest. Serials rise and may have gaps: a trainer
        that dies between a manifest and its announcement leaves one."""
        following = bisect.bisect_right(self._serials, replica.serial)
        if following == len(self._serials):
            return None
        return max(self._policies[self._serials[following]][2], replica.applied_at)


def rotation(
    replicas: Replicas, policies: Policies, now: float, patience_s: float, silent: Collection[str] = ()
) -> dict[str, ReplicaState]:
    """Replicas that serve rollouts, each with the version that it serves. Where none follows what is published, those that said
    why and still hold a version whole serve that one: the gate keeps what they sample within the staleness bound."""
    return following(replicas, policies, now, patience_s, silent) or standby(replicas)


def standby(replicas: Replicas) -> dict[str, ReplicaState]:
    """Replicas that could not load the version they should serve and still answer with an earlier one."""
    holding = (
        (name, one) for name, one in replicas.items() if not one.ok and one.pool == "rollout" and one.serving >= 0
    )
    return {name: replace(one, serial=one.serving) for name, one in holding}


def damaged(replicas: Replicas, base: int) -> dict[str, ReplicaState]:
    """Replicas that report a version as damaged or lost. `base`: the newest version that was published as a full base; what was
    before it is needed no more."""
    return {name: one for name, one in replicas.items() if one.damaged and one.pool == "rollout" and one.serial >= base}


def following(
    replicas: Replicas, policies: Policies, now: float, patience_s: float, silent: Collection[str] = ()
) -> dict[str, ReplicaState]:
    """Replicas that serve rollouts and take what is published. One that has not followed a publication for `patience_s` seconds
    is out: it is dead or cut off, and requests carry a floor that keeps an older one from serving them. `silent`: those that no
    worker gets an answer from; they are out after SILENT_S."""
    published = _Published(policies)

    def follows(name: str, replica: ReplicaState) -> bool:
        since = published.waits_since(replica)
        return since is None or now - since <= (min(SILENT_S, patience_s) if name in silent else patience_s)

    serving = ((name, one) for name, one in replicas.items() if one.ok and one.pool == "rollout")
    return {name: replica for name, replica in serving if follows(name, replica)}


def gone(replicas: Replicas, policies: Policies, patience_s: float, silent_s: Callable[[float], float]) -> list[str]:
    """Return those to forget. `silent_s`: seconds from a time on in which somebody listened. Of an engine of another pool
    nothing is needed then: what evaluations are of, and what was promoted, stays on its own account."""
    published = _Published(policies)

    def out_since(replica: ReplicaState) -> float | None:
        if not replica.ok:
            return replica.applied_at
        if replica.pool != "rollout":
            return replica.applied_at + MUTE_S
        since = published.waits_since(replica)
        return None if since is None else since + patience_s

    out = ((name, out_since(replica)) for name, replica in replicas.items())
    return [name for name, since in out if since is not None and silent_s(since) > GONE_S]


def served(replicas: Replicas, policies: Policies, now: float, patience_s: float) -> set[int]:
    """Versions that somebody serves: the rotation, those that stand by, and engines of other pools until they are forgotten
    (`gone`)."""
    others = {one.serial for one in replicas.values() if one.ok and one.pool != "rollout"}
    found = following(replicas, policies, now, patience_s) | standby(replicas)
    return others | {one.serial for one in found.values()}
