"""Scored attempts of a run, read from the ledger and the object store. It writes nothing.

A verdict that lacks a term of today can be completed: the term is computed from the stored trajectory, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
from sqlalchemy import Engine, select

from services.reward.formats import Formats
from services.reward.grade import look_of
from services.reward.habits import Done, done
from services.reward.rescore import Record
from services.reward.term_workers import TermWorkers
from shared.contracts.graded import Graded, verdict_key
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Ref, RewardConfig, RunConfig
from shared.contracts.trajectory import unpack
from shared.environments import Places
from shared.environments.registry import Environments
from shared.ledger.models import Attempt, Group, Run, VerdictRow
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.problems import Problem
from shared.problems.pack import Lines

READERS = 16  # threads: an object store answers many at a time


class UnknownRun(ValueError):
    """The ledger has no such run; the text says which it has."""


def named(engine: Engine, run: str) -> str:
    """Return the run, or the newest where `run` is empty. Raises UnknownRun."""
    with engine.begin() as connection:
        known = list(connection.execute(select(Run.run_id).order_by(Run.run_id)).scalars())
    if not known:
        raise UnknownRun("the ledger has no run yet; start one (etude demo)")
    if run and run not in known:
        raise UnknownRun(f"run: found {run!r}; the ledger has {', '.join(known[-5:])}")
    return run or known[-1]


def config_of(engine: Engine, objects: Objects, run: str) -> RunConfig:
    """Return the configuration that holds for the run now."""
    with engine.begin() as connection:
        ref = connection.execute(select(Run.config).where(Run.run_id == run)).scalar()
    if not isinstance(ref, Ref):
        raise UnknownRun(f"{run}: the ledger names no configuration")
    return msgspec.json.decode(objects.get(ref), type=RunConfig)


def read(engine: Engine, objects: Objects, run: str) -> list[tuple[Record, Ref | None]]:
    """Return the scored attempts, in the order of their groups, each with the reference of its trajectory."""
    a, v, g = Attempt, VerdictRow, Group
    columns = (
        a.attempt_id, a.group_id, g.problem_id, v.epoch, v.verdict, a.effort, v.reward, v.terms, v.reward_config, a.trajectory,
        a.newest_version,
    )  # fmt: skip
    wanted = (
        select(*columns)
        .join(v, (v.run_id == a.run_id) & (v.attempt_id == a.attempt_id))
        .join(g, (g.run_id == a.run_id) & (g.group_id == a.group_id))
        .where(a.run_id == run)
        .order_by(a.group_id, a.place)
    )
    with engine.begin() as connection:
        rows = connection.execute(wanted).all()
    with ThreadPoolExecutor(READERS) as pool:
        verdicts = pool.map(lambda row: _graded(objects, run, row), rows)
        return [
            (Record(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], graded, r[10]), r[9])
            for r, graded in zip(rows, verdicts, strict=True)
            if r[5] is not None
        ]


def _graded(objects: Objects, run: str, row: Sequence[object]) -> Graded | None:
    attempt, group, problem, epoch = row[:4]
    key = AttemptKey(attempt=str(attempt), epoch=int(str(epoch)), group=str(group), problem=str(problem))
    trajectory = row[9] if isinstance(row[9], Ref) else None
    for name in dict.fromkeys((verdict_key(run, key, trajectory), verdict_key(run, key, None))):
        try:
            return msgspec.json.decode(objects.get(objects.head(name)), type=Graded)
        except ObjectMissing:  # an earlier release kept one verdict for the epoch, under the second name
            continue
        except (ObjectDamaged, msgspec.MsgspecError):
            return None
    return None


def contents(
    objects: Objects,
    records: Sequence[tuple[Record, Ref | None]],
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Done]:
    """Read trajectories; one that is lost or damaged is left out."""

    def one(ref: Ref | None) -> Done | None:
        try:
            return None if ref is None else done(unpack(objects.get(ref)))
        except (ObjectMissing, ObjectDamaged, ValueError):
            return None

    found: dict[str, Done] = {}
    with ThreadPoolExecutor(READERS) as pool:
        for number, ((record, _), read) in enumerate(zip(records, pool.map(one, (r for _, r in records)), strict=True)):
            if read is not None:
                found[record.attempt] = read
            progress(number + 1)
    return found


def completed(
    records: Sequence[tuple[Record, Ref | None]],
    config: RewardConfig,
    *,
    objects: Objects,
    run: RunConfig,
    workers: TermWorkers,
    formats: Formats,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[Record]:
    """Yield the records, with the terms of `config` that their verdicts lack computed from the trajectories."""
    wanted = [name for name, weight in config.behaviour.items() if weight]
    problems: Lines[Problem] | None = None
    environments = Environments(Places(objects=objects))
    for number, (record, ref) in enumerate(records):
        graded = record.graded
        lacking = [name for name in wanted if graded is not None and _lacks(graded, name)]
        if graded is None or not lacking or ref is None:
            yield record
            continue
        try:
            problems = problems if problems is not None else Lines(objects.get(run.pack), Problem)
            packed, problem = objects.get(ref), problems[record.problem]
            environment = environments.of(problem)
            submission = unpack(packed).submission
            given = environment.given(problem, [*submission.files, *submission.changes])
            look = look_of(packed, given, environment.brief(problem), *formats.of(run.run), task=problem.task)
            found = workers.look(msgspec.structs.replace(look, names=lacking))
        except Exception as error:  # one attempt that cannot be read is named, and the others go on
            reason = f"{type(error).__name__}: {error}"
            yield replace(record, graded=_with(graded, quarantined=dict.fromkeys(lacking, reason), terms=lacking))
        else:
            yield replace(
                record, graded=_with(graded, findings=found.findings, quarantined=found.quarantined, terms=lacking)
            )
        progress(number + 1, len(records))


# Of verdicts that do not say what their grader had: the terms of that time.
_OF_BEFORE = frozenset(
    {"broken_tool_call", "no_submit", "terminal_only", "thoughts_in_comments", "todo_unfinished", "untested_submit"}
)


def _lacks(graded: Graded, name: str) -> bool:
    return name not in (graded.terms if graded.terms is not None else _OF_BEFORE)


def _with(graded: Graded, *, terms: list[str], **more: Mapping[str, object]) -> Graded:
    old = graded.terms if graded.terms is not None else sorted(_OF_BEFORE)
    fields = {name: {**getattr(graded, name), **found} for name, found in more.items()}
    return msgspec.structs.replace(graded, terms=[*old, *terms], **fields)
