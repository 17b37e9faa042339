"""The flow of work as a picture: who waits on whom since when, how much lies between two services, how old it is. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.console.measures import Samples, total
from services.console.neighbours import Neighbour, Wait
from shared.contracts import topics as t


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was found at one moment. `at`: seconds of one clock. `lags`: (topic, group) -> messages that the group has not
    acknowledged; a pair that could not be asked for is missing."""

    at: float
    neighbours: tuple[Neighbour, ...] = ()
    lags: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Between:
    """A way from one service to another. `group`: the consumers that acknowledge; "": everybody reads it."""

    source: str
    target: str
    what: str
    group: str = ""


WAYS = (
    Between("curator", "scheduler", t.PROBLEMS_ADMITTED.name, "scheduler"),
    Between("scheduler", "rollout", t.ROLLOUTS_REQUESTED.name, "rollout"),
    Between("rollout", "reward", t.ROLLOUTS_FINISHED.name, "reward"),
    Between("reward", "scheduler", t.ROLLOUTS_SCORED.name, "scheduler"),
    Between("scheduler", "trainer", t.GROUPS_READY.name, "trainer"),
    Between("trainer", "scheduler", t.STEPS_COMMITTED.name, "scheduler"),
    Between("trainer", "inference", t.POLICIES_PUBLISHED.name),
    Between("inference", "rollout", "tokens"),
    Between("reward", "grader", "jobs"),
    Between("evaluator", "rollout", "evaluations"),
)
SERVICES = tuple(dict.fromkeys(name for way in WAYS for name in (way.source, way.target)))
# What a service says that it waits on, by how it begins -> the way that is meant.
_MEANT = {
    ("rollout", "inference"): "tokens",
    ("trainer", "groups"): t.GROUPS_READY.name,
    ("scheduler", "a rollout worker"): t.ROLLOUTS_REQUESTED.name,
    ("scheduler", "admitting"): t.GROUPS_READY.name,
    ("scheduler", "an inference replica"): "tokens",
    ("scheduler", "problems"): t.PROBLEMS_ADMITTED.name,
    ("reward", "graders"): "jobs",
    ("reward", "jobs"): "jobs",
}


@dataclass(frozen=True, slots=True)
class Node:
    """`state`: ready, waiting, silent, or absent (no replica has announced itself). `wait`: the longest of its replicas."""

    service: str
    replicas: int
    ready: int
    state: str
    wait: Wait | None
    figure: str


@dataclass(frozen=True, slots=True)
class Edge:
    """`waiting`: what lies there now. `per_minute`, `age_s`: of what was taken since the look before. None: not known.
    `awaited`: somebody says that he waits for what comes this way."""

    way: Between
    waiting: int | None
    per_minute: float | None
    age_s: float | None
    awaited: bool


@dataclass(frozen=True, slots=True)
class Flow:
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def flow(now: Snapshot, before: Snapshot | None) -> Flow:
    nodes = tuple(_node(service, now) for service in SERVICES)
    awaited = {_meant(node) for node in nodes}
    return Flow(nodes, tuple(_edge(way, now, before, way.what in awaited) for way in WAYS))


def _node(service: str, now: Snapshot) -> Node:
    mine = [n for n in now.neighbours if n.service == service]
    ready = sum(n.state == "ready" for n in mine)
    waits = [wait for n in mine for wait in n.waits]
    states = {n.state for n in mine}
    state = next((s for s in ("waiting", "silent", "ready") if s in states), "absent")
    wait = max(waits, key=lambda w: w.seconds, default=None)
    return Node(service, len(mine), ready, state, wait, _figure(service, [n.samples for n in mine]))


def _figure(service: str, samples: Sequence[Samples]) -> str:
    """What it has in hand, in words; empty: it does not say."""

    def of(name: str, **labels: str) -> int | None:
        value = total(samples, name, **labels)
        return None if value is None or not math.isfinite(value) else round(value)

    match service:
        case "scheduler":
            under_way, attempts = of("etude_scheduler_groups", state="open"), of("etude_scheduler_attempts")
            return "" if under_way is None else f"{under_way:,} groups, {attempts or 0:,} attempts"
        case "inference":
            serials = {
                value
                for one in samples
                for (name, labels), value in one.items()
                if name == "etude_inference_serial" and ("pool", "rollout") in labels
            }
            running = of("sglang:num_running_reqs")
            spans = "–".join(f"{v:.0f}" for v in sorted({min(serials), max(serials)})) if serials else ""
            said = [f"version {spans}" if spans else "", "" if running is None else f"{running:,} requests"]
            return ", ".join(filter(None, said))
    name, words = {
        "rollout": ("etude_rollout_running_attempts", "attempts in hand"),
        "reward": ("etude_reward_in_hand_attempts", "being judged"),
        "trainer": ("etude_trainer_groups_in_hand", "groups in hand"),
        "evaluator": ("etude_evaluator_open_evaluations", "evaluations open"),
    }.get(service, ("", ""))
    value = of(name) if name else None
    return "" if value is None else f"{value:,} {words}"


def _meant(node: Node) -> str:
    """The way that a waiting service waits for; "": none of the picture."""
    if node.wait is None:
        return ""
    said = node.wait.what
    return next((way for (who, begins), way in _MEANT.items() if who == node.service and said.startswith(begins)), "")


def _edge(way: Between, now: Snapshot, before: Snapshot | None, awaited: bool) -> Edge:
    samples = [n.samples for n in now.neighbours]
    waiting = now.lags.get((way.what, way.group))
    if way.what == t.GROUPS_READY.name:  # the trainer acknowledges at once; what waits for its step, the ledger knows
        waits = total(samples, "etude_scheduler_groups", state="waiting")
        waiting = waiting if waits is None else round(waits)
    if before is None or not way.group or now.at <= before.at:
        return Edge(way, waiting, None, None, awaited)
    labels = {"topic": way.what, "group": way.group}
    taken = _gained(now, before, "etude_bus_deliveries_total", **labels)
    aged = _gained(now, before, "etude_bus_delivery_age_seconds_sum", **labels)
    counted = _gained(now, before, "etude_bus_delivery_age_seconds_count", **labels)
    rate = None if taken is None else taken * 60 / (now.at - before.at)
    return Edge(way, waiting, rate, aged / counted if aged is not None and counted else None, awaited)


def _gained(now: Snapshot, before: Snapshot, name: str, **labels: str) -> float | None:
    """By how much the counters of replicas that are in both have risen; None: nobody counts. One that began anew counts
    from 0."""
    old = {n.name: n.samples for n in before.neighbours}
    wanted, gained = set(labels.items()), None
    for neighbour in now.neighbours:
        for (found, series), value in neighbour.samples.items():
            if found == name and wanted <= series and neighbour.name in old:
                was = old[neighbour.name].get((found, series), 0.0)
                gained = (gained or 0.0) + (value - was if value >= was else value)
    return gained
