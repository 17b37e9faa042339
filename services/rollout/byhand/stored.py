"""An attempt of a run, read from the object store: `RUN/ATTEMPT`. The reward comes from the ledger, where one is at hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from services.rollout.byhand.changes import unified
from services.rollout.byhand.kept import Said
from services.rollout.byhand.shown import View, outcome
from services.rollout.byhand.watched import ResultSeen, Turn, turn_of
from services.rollout.config import RolloutSettings
from shared import ledger
from shared.attempts import newest_trajectory
from shared.contracts.graded import Graded, verdict_key
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Ref, RunConfig
from shared.contracts.trajectory import Segment, Span, Trajectory, unpack
from shared.environments import InfrastructureError, Places, ToolSpec
from shared.environments.registry import Environments
from shared.ledger.models import VerdictRow
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.problems import Problem
from shared.problems.pack import Lines
from shared.renderers import Renderer
from shared.renderers.chat import schema_of
from shared.renderers.registry import load_renderer
from shared.weights.checkpoint_objects import download_directory

_SHOWN = 3  # attempts that an error offers


class NotStored(ValueError):
    """The attempt cannot be read; the text says what is missing."""


def view_of(run: str, attempt: str, objects: Objects, settings: RolloutSettings) -> View:
    """Return an attempt of a run. Raises NotStored, OSError."""
    try:
        config = msgspec.json.decode(objects.get(objects.head(f"runs/{run}/config.json")), type=RunConfig)
    except ObjectMissing:
        raise NotStored(f"found no run {run!r:.80} in {settings.objects_url}; `etude runs` lists them") from None
    except (ObjectDamaged, msgspec.MsgspecError) as error:
        raise NotStored(f"run {run}: its configuration cannot be read: {error}") from None
    ref = newest_trajectory(objects, run, attempt) if attempt else None
    if ref is None:
        some = (
            ", ".join(f"{run}/{name}" for name in _some_attempts(objects, run)) or "none, since it has no attempts yet"
        )
        raise NotStored(
            f"run {run} has no trajectory of attempt {attempt!r:.80}; allowed: {some} (`etude ledger show {run}`)"
        )
    try:
        trajectory = unpack(objects.get(ref))
        directory = download_directory(objects, config.base, settings.formats / config.base.checksum, weights=False)
        renderer = load_renderer(directory)
    except (ValueError, ObjectMissing) as error:
        raise NotStored(f"{run}/{attempt}: {error}") from None
    return _view(run, config, ref, trajectory, renderer, objects, settings)


def _some_attempts(objects: Objects, run: str) -> list[str]:
    """Return a few attempts of a run that have left a trajectory or a verdict."""
    before = f"runs/{run}/attempts/"
    names = itertools.groupby(key[len(before) :].partition("/")[0] for key in objects.list(before))
    return [name for name, _ in itertools.islice(names, _SHOWN)]


def _view(
    run: str,
    config: RunConfig,
    ref: Ref,
    trajectory: Trajectory,
    renderer: Renderer,
    objects: Objects,
    settings: RolloutSettings,
) -> View:
    key = trajectory.key
    graded = _graded(objects, run, trajectory, ref)
    reward, terms = _reward(settings, run, key)
    problem = _problem(objects, config, key.problem)
    environments = Environments(Places(objects=objects, cache=settings.state / "cache" / "environments"))
    tools = _tools(problem, environments)
    first = trajectory.segments[0] if trajectory.segments else None
    ungraded = "no grader has left a verdict"
    return View(
        title=f"{run}/{key.attempt}",
        facts={
            "problem": f"{key.problem} ({problem.kind if problem is not None else 'not in the packs of the run'})",
            "group": f"{key.group}, index {key.index}, epoch {key.epoch}, to {key.purpose}",
            "format": renderer.name,
            "versions": versions(trajectory),
            "effort": effort(trajectory),
            **({"worker": worker} if (worker := trajectory.notes.get("worker")) else {}),
        },
        opening=[Said(role="prompt", content=renderer.text(_prompt(first)))] if first is not None else [],
        turns=turns_of(trajectory, renderer, tools),
        diff=_diff(problem, trajectory, environments),
        trajectory=trajectory,
        renderer=renderer,
        outcome=outcome(str(trajectory.stop), graded.verdict if graded else None, ungraded),
        solved=graded.verdict.solved if graded else None,
        findings={name: finding.evidence for name, finding in graded.findings.items()} if graded else {},
        reward=reward,
        terms=terms,
        policy=run,
        tools=[schema_of(tool) for tool in tools],
    )


def versions(trajectory: Trajectory) -> str:
    """Return the versions that sampled, and the oldest whose keys and values were read."""
    found = [segment for segment in trajectory.segments if segment.loss_mask.any()]
    if not found:
        return "none: no token was sampled by a policy of ours"
    oldest = min(int(segment.versions[segment.loss_mask].min()) for segment in found)
    newest = max(int(segment.versions[segment.loss_mask].max()) for segment in found)
    return f"{oldest}–{newest}, keys and values from {min(segment.oldest_kv_version for segment in found)}"


def effort(trajectory: Trajectory) -> str:
    found = trajectory.effort
    return (
        f"{found.turns} turns, {found.tool_calls} calls ({found.broken_tool_calls} broken), {found.edits} edits, {found.tests} "
        f"tests; {found.sampled_tokens} tokens sampled ({found.thinking_tokens} thinking), {found.tool_output_tokens} observed"
    )


def turns_of(trajectory: Trajectory, renderer: Renderer, tools: Sequence[ToolSpec]) -> list[Turn]:
    """Return the turns as text, read again from the ids by the renderer that wrote them."""
    segments = enumerate(trajectory.segments)
    return [turn for number, segment in segments for turn in _turns(number, segment, renderer, tools)]


def _turns(number: int, segment: Segment, renderer: Renderer, tools: Sequence[ToolSpec]) -> list[Turn]:
    found: list[Turn] = []
    for spans in _by_turn(segment):
        said = [span for span in spans if segment.loss_mask[span.start : span.end].any()]
        if not said:
            continue
        start, end = said[0].start, said[-1].end
        ids = segment.tokens.tolist()
        reading = renderer.reading(ids[start:end], ids[:start], tools)
        turn = turn_of(
            reading,
            [],
            number=said[0].turn,
            segment=number,
            tokens=end - start,
            versions=(int(segment.versions[start:end].min()), int(segment.versions[start:end].max())),
        )
        seen = [_seen(span, ids, renderer) for span in spans if span.start >= end]
        nothing = not (turn.thinking or turn.text or turn.calls)
        text = renderer.text(ids[start:end]) if nothing else turn.text
        found.append(msgspec.structs.replace(turn, text=text, results=seen, fault=said[0].fault))
    return found


def _by_turn(segment: Segment) -> list[list[Span]]:
    turns: dict[int, list[Span]] = {}
    for span in segment.spans:
        turns.setdefault(span.turn, []).append(span)
    return [turns[turn] for turn in sorted(turns) if turn > 0]


def _seen(span: Span, ids: list[int], renderer: Renderer) -> ResultSeen:
    tested = span.tool == "test"
    return ResultSeen(
        tool=span.tool,
        text=renderer.text(ids[span.start : span.end]),
        ok=span.ok,
        passed=span.passed if tested and span.ok else None,
    )


def _prompt(segment: Segment) -> list[int]:
    end = next((span.end for span in reversed(segment.spans) if span.turn == 0), 0)
    found: list[int] = segment.tokens[:end].tolist()
    return found


def _problem(objects: Objects, config: RunConfig, id: str) -> Problem | None:
    for pack in (config.pack, config.eval_pack):
        if pack is None:
            continue
        try:
            lines: Lines[Problem] = Lines(objects.get(pack), Problem)
            return lines[id]
        except (KeyError, ValueError, ObjectMissing):
            continue
    return None


def _tools(problem: Problem | None, environments: Environments) -> Sequence[ToolSpec]:
    try:
        return () if problem is None else environments.of(problem).brief(problem).tools
    except (InfrastructureError, ValueError):
        return ()


def _diff(problem: Problem | None, trajectory: Trajectory, environments: Environments) -> str:
    if problem is None:
        return ""
    try:
        return unified(environments.of(problem), problem, trajectory.submission)
    except (InfrastructureError, ObjectMissing, OSError, ValueError) as error:
        return f"the files as they were given cannot be read: {error}"


def _graded(objects: Objects, run: str, trajectory: Trajectory, ref: Ref) -> Graded | None:
    """Return the verdict on the trajectory, or one that an earlier release left of its epoch. None: no grader has left one
    that can be read."""
    for key in (verdict_key(run, trajectory.key, ref), verdict_key(run, trajectory.key, None)):
        try:
            return msgspec.json.decode(objects.get(objects.head(key)), type=Graded)
        except ObjectMissing:
            continue
        except (ObjectDamaged, msgspec.MsgspecError):
            return None
    return None


def _reward(settings: RolloutSettings, run: str, key: AttemptKey) -> tuple[float | None, Mapping[str, float]]:
    """Return reward and terms as the ledger has them; None: it has none, or there is no ledger here."""
    row = VerdictRow
    wanted = (row.run_id == run) & (row.attempt_id == key.attempt) & (row.epoch == key.epoch)
    try:
        with ledger.connect(settings.ledger_url, read_only=True).begin() as connection:
            found = connection.execute(select(row.reward, row.terms).where(wanted)).first()
    except (ledger.LedgerMissing, SQLAlchemyError, ValueError, OSError):
        return None, {}
    return (None, {}) if found is None else (float(found.reward), found.terms)
