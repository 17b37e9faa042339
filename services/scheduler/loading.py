"""A run from the ledger into a working set.

Rows of problems and groups are streamed. A fork changes what was trained, and neither which problems there are nor what was
learnt of them: then only groups are read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from services.scheduler import probing
from services.scheduler.hardness import Outcome
from services.scheduler.records import (
    ADMISSIONS,
    COMPLETE,
    CONFIGURED,
    ROLLBACK,
    Attempt,
    Group,
    Head,
    ReplicaState,
    of_row,
    returns,
)
from services.scheduler.rows import TABLES
from services.scheduler.working_set import AGAIN_S, WorkingSet, meaning
from shared.contracts.life import RunState
from shared.contracts.lineage import Fork, Lineage
from shared.contracts.messages import BY_SCHEDULER, Alert, Rollback, earned_by_step
from shared.contracts.run import Ref
from shared.contracts.topics import ALERTS
from shared.ledger.transitions import AttemptState, GroupState

ROWS = 50_000  # of a stream, in memory at a time


def load(connection: Connection, run: str, now: float, before: WorkingSet | None = None) -> WorkingSet | None:
    """None: the ledger has not heard of this run. `now`: all leases start at this time. `before`: the run as it was before
    a fork, all written down; its problems and its estimates are taken over."""
    found = _all(connection, "runs", run)
    if not found:
        return None
    head = of_row(Head, found[0])
    head.state = RunState(head.state)
    ws = WorkingSet(head)
    _load_life(connection, ws, now)
    _load_trainer(connection, ws)
    _load_packs(connection, ws)
    if before is None:
        _load_problems(connection, ws)
    else:
        ws.catalogue, ws.hardness, ws.probed = before.catalogue, before.hardness, before.probed
        ws.catalogue.forget_groups()
    _load_groups(connection, ws, learnt=before is not None)
    _load_open(connection, ws, now)
    _load_alerts(connection, ws, now)
    ws.last_work_at, ws.loaded_at = _worked_at(connection, ws), now
    return ws


def _load_life(connection: Connection, ws: WorkingSet, now: float) -> None:
    """What a status says of the run, from the events that are about it as a whole: few, and found by an index."""
    t = TABLES["events"].c
    of_the_run = select(t.kind, t.at, t.data).where(t.run_id == ws.id, t.subject == "").order_by(t.sequence)
    ws.resumed_at = now
    for kind, at, data in connection.execute(of_the_run):
        ws.spoken = max(ws.spoken, int(1000 * at))
        if kind == CONFIGURED:
            if not ws.started:
                ws.started, ws.beside = at, data.get("beside", False)
            if "size" in data:  # an older release wrote none
                ref = Ref(key=data["config"], size=data["size"], checksum=data["checksum"])
                ws.configs += [ref] if ref not in ws.configs[-1:] else []
        elif kind == ROLLBACK and "id" in data:
            ws.rollback = Rollback(data["serial"], data["id"])
        elif kind == COMPLETE:
            ws.complete = True
        elif kind == f"run.{ws.head.state}":
            ws.resumed_at, ws.by = at, data.get("by", BY_SCHEDULER)
    if not ws.configs and ws.head.config is not None:
        ws.configs.append(ws.head.config)


def _worked_at(connection: Connection, ws: WorkingSet) -> float:
    """Return when there was last something to do."""
    t = TABLES["groups"].c
    groups = connection.execute(select(func.max(t.requested_at), func.max(t.closed_at)).where(t.run_id == ws.id)).one()
    known = [*groups, ws.resumed_at, *ws.admissions[-1:], *ws.commits[-1:]]
    return max(at for at in known if at is not None)


def _all(connection: Connection, table: str, run: str, *order: str) -> list[Any]:
    t = TABLES[table]
    return list(connection.execute(select(t).where(t.c.run_id == run).order_by(*[t.c[name] for name in order])))


def _load_trainer(connection: Connection, ws: WorkingSet) -> None:
    ws.lineage = Lineage({r.incarnation: Fork(r.parent, r.step) for r in _all(connection, "incarnations", ws.id)})
    for r in _all(connection, "policies", ws.id, "serial"):
        ws.policies[r.serial] = (r.incarnation, r.step, r.published_at)
        if r.parent < 0:
            ws.base = r.serial
    for r in _all(connection, "replicas", ws.id):
        ws.replicas[r.replica] = of_row(ReplicaState, r)
    ws.tip = ws.lineage.start
    for r in _all(connection, "steps", ws.id, "committed_at", "step"):
        ws.steps[r.incarnation, r.step] = r.serial
        if ws.lineage.survives(r.incarnation, r.step):
            ws.commits.append(r.committed_at)
            ws.note_seconds(r.metrics)
            ws.tip = max(ws.tip, r.step)
    for r in _all(connection, "trained", ws.id):
        if ws.lineage.survives(r.incarnation, r.step):
            ws.trained.add(r.group_id)


def _load_alerts(connection: Connection, ws: WorkingSet, now: float) -> None:
    """What was said lately is not said again by the next scheduler; the outbox keeps it for longer than that."""
    t = TABLES["outbox"].c
    query = select(t.message, t.created_at).where(
        t.run_id == ws.id, t.topic == ALERTS.name, t.created_at > now - AGAIN_S
    )
    for message, at in connection.execute(query):
        ws.alerted[meaning(msgspec.json.decode(message, type=Alert))] = at


def _load_packs(connection: Connection, ws: WorkingSet) -> None:
    for r in _all(connection, "packs", ws.id):
        ws.packs[r.pack_hash] = (r.pack, r.pack_hidden)


def _load_problems(connection: Connection, ws: WorkingSet) -> None:
    t = TABLES["problems"].c
    query = select(t.problem_id, t.category, t.cell, t.pack_hash).where(t.run_id == ws.id)
    with connection.execute(query, execution_options={"yield_per": ROWS}) as found:
        for rows in found.partitions():
            ws.catalogue.add([tuple(row) for row in rows], checked=True)
    times = select(t.admitted_at).where(t.run_id == ws.id).distinct().order_by(t.admitted_at.desc()).limit(ADMISSIONS)
    ws.admissions = sorted(connection.execute(times).scalars())


def _streamed(connection: Connection, table: str, run: str, *order: str) -> Iterator[Any]:
    t = TABLES[table]
    query = select(t).where(t.c.run_id == run).order_by(*[t.c[name] for name in order])
    with connection.execute(query, execution_options={"yield_per": ROWS}) as found:
        yield from found


def _load_groups(connection: Connection, ws: WorkingSet, *, learnt: bool) -> None:
    """Open groups without their attempts, waiting groups, and of all others what counts and what they taught. `learnt`: the
    estimates know that already."""
    ready = []
    for r in _streamed(connection, "groups", ws.id, "problem_id", "number"):
        group = Group(
            id=r.group_id,
            problem=r.problem_id,
            number=r.number,
            draw=r.draw,
            size=r.size,
            reward_config=r.reward_config,
            requested_at=r.requested_at,
            state=GroupState(r.state),
            closed_at=r.closed_at,
            sequence=r.sequence,
            announced=r.announced,
            members=r.members,
            solved=r.solved,
            turns=r.turns,
            thinking_tokens=r.thinking_tokens,
            versions=list(r.versions),
            step=r.step,
            reason=r.reason,
        )
        ws.catalogue.opened(group.problem, group.number)
        ws.catalogue.take(group.problem)  # one that returns, too: it was drawn, which decides when it comes again
        if group.id not in ws.trained and returns(group.state, group.announced, ws.catalogue.count(group.problem)):
            ws.catalogue.give_back(group.problem)
        if group.sequence is not None:
            ws.announced[group.id] = group.problem
            ready.append(group)
        if group.state is GroupState.open:
            ws.open[group.id] = group
    for name in ws.trained:  # last: a later group of a problem, dropped for that, gives nothing back
        if name in ws.announced:
            ws.catalogue.take(ws.announced[name])
    probes = deque(() if learnt else probing.read(connection, ws.id))
    for group in sorted(ready, key=lambda g: g.sequence or 0):
        while probes and probes[0][0] < (group.sequence or 0):
            probing.learn(ws, probes.popleft()[1])
        if not learnt:
            category, cell = ws.catalogue.kind(group.problem)
            ws.hardness.observe(
                Outcome(category, cell, group.members, group.solved, group.turns, group.thinking_tokens, group.step)
            )
        if group.id in ws.trained:
            ws.trained_upto = group.sequence or 0
        elif group.state is GroupState.ready:
            ws.waiting[group.id] = group
        ws.latencies_s.append((group.closed_at or group.requested_at) - group.requested_at)
    for _, probed in probes:
        probing.learn(ws, probed)


def _load_open(connection: Connection, ws: WorkingSet, now: float) -> None:
    t = TABLES["attempts"]
    taken = select(func.max(t.c.claimed_at), func.max(t.c.finished_at)).where(t.c.run_id == ws.id)
    judged = t.c.state.in_((AttemptState.scored.value, AttemptState.grouped.value))
    graded = select(func.max(t.c.finished_at)).where(t.c.run_id == ws.id, judged)
    ws.graded_upto = connection.execute(graded).scalar() or 0.0
    v = TABLES["verdicts"]
    scored = select(func.max(v.c.scored_at)).where(v.c.run_id == ws.id)
    ws.scored_at = connection.execute(scored).scalar() or 0.0
    ws.taken_at = max((at for at in connection.execute(taken).one() if at is not None), default=0.0)
    config = ws.head.config
    if config is None and ws.open:
        raise RuntimeError(f"run {ws.id!r}: the ledger has open groups and no configuration; it is damaged")
    names = list(ws.open)
    for start in range(0, len(names), 200):
        for attempt in attempts_of(connection, ws.id, names[start : start + 200], now):
            ws.attempts[attempt.id] = attempt
            ws.open[attempt.group].attempts.append(attempt)


def attempts_of(connection: Connection, run: str, groups: list[str], now: float) -> list[Attempt]:
    a, v = TABLES["attempts"], TABLES["verdicts"]
    query = (
        select(a, v.c.reward, v.c.solved, v.c.verdict, v.c.terms)
        .outerjoin(v, (v.c.run_id == a.c.run_id) & (v.c.attempt_id == a.c.attempt_id))
        .where(a.c.run_id == run, a.c.group_id.in_(groups))
        .order_by(a.c.group_id, a.c.place)
    )
    return [
        Attempt(
            id=r.attempt_id,
            group=r.group_id,
            place=r.place,
            epoch=r.epoch,
            state=AttemptState(r.state),
            policy_floor=r.policy_floor,
            requested_at=r.requested_at,
            heard_at=r.requested_at if r.state == AttemptState.requested else now,
            oldest_version=r.oldest_version,
            newest_version=r.newest_version,
            worker=r.worker,
            claimed_at=r.claimed_at,
            finished_at=r.finished_at,
            cancelled_at=r.cancelled_at,
            stop=r.stop,
            seconds=r.seconds,
            trajectory=r.trajectory,
            effort=r.effort,
            reason=r.reason,
            unusable=r.reason if r.state == AttemptState.finished else "",
            sampled=r.sampled,
            grading_s=r.grading_s,
            grade_at=r.grade_at,
            asked_at=r.asked_at,
            repeats=r.repeats,
            gradings=r.gradings,
            overtaken_at=r.overtaken_at,
            checkpoint=r.checkpoint,
            reward=r.reward,
            solved=bool(r.solved),
            steps=msgspec.UNSET if r.verdict is None else earned_by_step(r.verdict, r.terms),
        )
        for r in connection.execute(query)
    ]
