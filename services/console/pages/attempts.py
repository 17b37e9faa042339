"""The attempts of a run, and one of them: as a conversation, and token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from services.console import changes, problem_view, transcript
from services.console.conversation import conversation
from services.console.evidence import given
from services.console.fate import fate, mismatches
from services.console.site import LIBRARY, number, page, run_of
from shared.contracts.messages import RolloutScored
from shared.contracts.run import Purpose
from shared.contracts.trajectory import Submission, Trajectory
from shared.objects import ObjectDamaged, ObjectMissing

PER_PAGE = 50
TOKENS_PER_PAGE = 1500
ROWS_PER_PAGE = 100  # of the table of figures: with 60 layers of 8 experts, a quarter of a megabyte
MANY_LAYERS = 8  # more of them are folded away


async def attempts_page(request: web.Request) -> web.Response:
    """Newest first. `?outcome=solved|unsolved`, `?purpose=train|evaluate`, `?problem=ID`, `?page=N`."""
    run = run_of(request)
    query = {name: request.query.get(name, "") for name in ("outcome", "purpose", "problem")}

    def wanted(scored: RolloutScored) -> bool:
        return (
            (query["outcome"] not in ("solved", "unsolved") or scored.verdict.solved == (query["outcome"] == "solved"))
            and (query["purpose"] not in list(Purpose) or scored.key.purpose == query["purpose"])
            and (not query["problem"] or scored.key.problem == query["problem"])
        )

    found = [scored for scored in reversed(run.attempts.values()) if wanted(scored)]
    pages = max(1, -(-len(found) // PER_PAGE))
    shown = min(number(request.query.get("page", "1"), 1), pages)
    return page(
        request,
        "attempts.html",
        run=run,
        found=len(found),
        attempts=found[(shown - 1) * PER_PAGE : shown * PER_PAGE],
        query=query,
        shown=shown,
        pages=pages,
    )


async def attempt_page(request: web.Request) -> web.Response:
    """One trajectory. `?segment=N&token=M` chooses the part that is shown token by token, `row=M` where the table of their figures
    begins."""
    run, attempt, library = run_of(request), request.match_info["attempt"], request.app[LIBRARY]
    scored = run.attempts.get(attempt)
    troubles: list[str] = []

    async def attempted(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """None, and a sentence for the page, where something cannot be had."""
        try:
            return await asyncio.to_thread(function, *arguments)
        except (ObjectMissing, ObjectDamaged, ValueError, OSError) as error:
            troubles.append(f"{what}: {type(error).__name__}: {error}")
            return None

    ref = scored.trajectory if scored else await attempted("trajectory", library.find_trajectory, run.run, attempt)
    if ref is None and not troubles:
        raise web.HTTPNotFound(reason="No attempt of this name has been scored or stored.")
    trajectory: Trajectory | None = await attempted("trajectory", library.trajectory, ref) if ref else None
    chat = await attempted("chat format", library.chat, run.run)
    config = await attempted("configuration", library.config, run.run)
    problem = None
    if config and trajectory:
        evaluating = trajectory.key.purpose == Purpose.evaluate and config.eval_pack
        pack = config.eval_pack if evaluating else config.pack
        problem = await attempted("problem", library.problem, pack, trajectory.key.problem)
    brief = await attempted("what the agent was told", library.brief, problem) if problem else None
    submission = trajectory.submission if trajectory else Submission()
    paths, before = [*submission.files, *submission.changes], None
    if problem and paths:
        before = await attempted("files before the attempt", library.given, problem, paths)
    segments = trajectory.segments if trajectory else []
    chosen = min(number(request.query.get("segment", "0"), 0), max(0, len(segments) - 1))
    first = number(request.query.get("token", "0"), 0)
    row = number(request.query.get("row", str(first)), 0)
    key = scored.key if scored else trajectory.key if trajectory else None
    graded = await attempted("what the grader found", library.graded, run.run, key, ref) if scored else None
    experts = None
    if trajectory and trajectory.routing and segments:
        reading = (trajectory.routing, chosen, row, ROWS_PER_PAGE)
        experts = await attempted("routed experts", library.experts, *reading)
    whose = fate(run, key) if key else None

    def render() -> web.Response:
        """In a thread: a long trajectory takes a while."""
        versions = [transcript.versions(segment) for segment in segments]
        sampled_by = sorted({version for found in versions for version in found})
        return page(
            request,
            "attempt.html",
            run=run,
            attempt=attempt,
            scored=scored,
            trajectory=trajectory,
            problem=problem_view.view(problem, brief) if problem else None,
            troubles=troubles,
            given=given(scored, graded, segments) if scored else [],
            fate=whose,
            mismatches=mismatches(run.steps, sampled_by, whose.step) if whose else [],
            row=row,
            rows=transcript.tokens(segments[chosen], chat, row, ROWS_PER_PAGE) if segments else [],
            rows_per_page=ROWS_PER_PAGE,
            experts=experts,
            many_layers=MANY_LAYERS,
            conversation=conversation(segments, chat, brief),
            versions=versions,
            chosen=chosen,
            first=first,
            per_page=TOKENS_PER_PAGE,
            tokens=transcript.tokens(segments[chosen], chat, first, TOKENS_PER_PAGE) if segments else [],
            length=len(segments[chosen].tokens) if segments else 0,
            changes=changes.of(submission, before),
        )

    return await asyncio.to_thread(render)
