"""A run from the ledger into a working set."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from services.scheduler.hardness import Outcome
from services.scheduler.records import Attempt, Group, Head, ReplicaState, returns
from services.scheduler.rows import TABLES
from services.scheduler.working_set import AGAIN_S, WorkingSet, meaning
from shared.contracts.lineage import Fork, Lineage
from shared.contracts.messages import Alert
from shared.contracts.topics import ALERTS
from shared.ledger.transitions import AttemptState, GroupState, RunState


def load(connection: Connection, run: str, now: float) -> WorkingSet | None:
    """None: the ledger has not heard of this run. `now`: leases begin anew."""
    found = _all(connection, "runs", run)
    if not found:
        return None
    head = Head(**{f.name: getattr(found[0], f.name) for f in fields(Head)})
    head.state = RunState(head.state)
    ws = WorkingSet(head)
    events = TABLES["events"].c
    of_the_run = (events.run_id == ws.id) & (events.subject == "")  # its states: few, and found by an index
    ws.spoken = int(1000 * (connection.execute(select(func.max(events.at)).where(of_the_run)).scalar() or 0.0))
    _load_trainer(connection, ws)
    _load_problems(connection, ws)
    _load_groups(connection, ws)
    _load_open(connection, ws, now)
    _load_alerts(connection, ws, now)
    ws.last_work_at = ws.resumed_at = now
    return ws


def _all(connection: Connection, table: str, run: str, *order: str) -> list[Any]:
    t = TABLES[table]
    return list(connection.execute(select(t).where(t.c.run_id == run).order_by(*[t.c[name] for name in order])))


def _load_trainer(connection: Connection, ws: WorkingSet) -> None:
    ws.lineage = Lineage({r.incarnation: Fork(r.parent, r.step) for r in _all(connection, "incarnations", ws.id)})
    for r in _all(connection, "policies", ws.id, "serial"):
        ws.policies[r.serial] = (r.incarnation, r.step, r.published_at)
    for r in _all(connection, "replicas", ws.id):
        ws.replicas[r.replica] = ReplicaState(r.pool, r.serial, r.ok, r.url, r.pause_s, r.applied_at, r.reason)
    ws.tip = ws.lineage.start
    for r in _all(connection, "steps", ws.id, "committed_at", "step"):
        ws.steps[r.incarnation, r.step] = r.serial
        if ws.lineage.survives(r.incarnation, r.step):
            ws.commits.append(r.committed_at)
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


def _load_problems(connection: Connection, ws: WorkingSet) -> None:
    for r in _all(connection, "packs", ws.id):
        ws.packs[r.pack_hash] = (r.pack, r.pack_hidden)
    rows = _all(connection, "problems", ws.id, "problem_id")
    ws.catalogue.add([(r.problem_id, r.category, r.cell, r.pack_hash) for r in rows])


def _load_groups(connection: Connection, ws: WorkingSet) -> None:
    """Open groups without their attempts, waiting groups, and of all others what counts and what they taught."""
    ready = []
    for r in _all(connection, "groups", ws.id, "problem_id", "number"):
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
        ws.catalogue.numbers[ws.catalogue.index[group.problem]] = group.number + 1
        if group.id in ws.trained or not returns(group.state, group.announced, group.number):
            ws.catalogue.take(group.problem)
        else:
            ws.catalogue.give_back(group.problem)
        if group.sequence is not None:
            ws.announced[group.id] = group.problem
            ready.append(group)
        if group.state is GroupState.open:
            ws.open[group.id] = group
    for name in ws.trained:  # last: a later group of a problem, dropped for that, gives nothing back
        if name in ws.announced:
            ws.catalogue.take(ws.announced[name])
    for group in sorted(ready, key=lambda g: g.sequence or 0):
        category, cell = ws.catalogue.kind(group.problem)
        ws.hardness.observe(
            Outcome(category, cell, group.members, group.solved, group.turns, group.thinking_tokens, group.step)
        )
        if group.state is GroupState.ready and group.id not in ws.trained:
            ws.waiting[group.id] = group


def _load_open(connection: Connection, ws: WorkingSet, now: float) -> None:
    t = TABLES["attempts"]
    taken = select(func.max(t.c.claimed_at), func.max(t.c.finished_at)).where(t.c.run_id == ws.id)
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
        select(a, v.c.reward, v.c.solved)
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
            heard_at=now,
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
            reward=r.reward,
            solved=bool(r.solved),
        )
        for r in connection.execute(query)
    ]
