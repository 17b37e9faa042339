"""What the demo says while it runs: each phase speaks of itself alone, and says at its end what it came to. And its plot."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from etude.demo.options import DemoOptions
from etude.demo.progress import Progress
from etude.demo.report import Outcome, plot
from etude.demo.watch import Evaluation, Practice, evaluation_end, watching
from shared.contracts import messages as m
from shared.contracts.run import Purpose, Ref, RunConfig, ScheduleConfig

REF = Ref(key="x", size=1, checksum="0" * 32)
NOW = 1000.0


def scored(attempt: str, *, solved: bool, purpose: Purpose, version: int = 0) -> m.RolloutScored:
    return m.RolloutScored(
        run="r",
        key=m.AttemptKey(attempt=attempt, epoch=0, group="g", problem="p", purpose=purpose),
        verdict=m.Verdict(solved=solved, passed=1, total=1),
        reward=1.0,
        terms={},
        reward_config="default",
        trajectory=REF,
        effort=m.Effort(final_tokens=30),
        stop=m.StopReason.submitted,
        oldest_version=version,
    )


def step(number: int, solved_share: float) -> m.StepCommitted:
    return m.StepCommitted(
        run="r", incarnation=1, step=number, serial=number, groups={"g": 2}, metrics={"solved_share": solved_share}
    )


def test_practice_shows_nothing_of_the_evaluation_before_it() -> None:
    progress = Progress()
    for i in range(30):
        progress.see(scored(f"e{i}", solved=True, purpose=Purpose.evaluate), NOW)
    assert Practice(progress).line(NOW) == "first attempts: 0 scored, 0.0% solved, 0 tokens/s"


def test_an_evaluation_shows_all_of_its_attempts_once_and_those_of_its_version_alone() -> None:
    progress = Progress()
    view = Evaluation(progress, serial=7, total=8)
    assert view.line(NOW) == "no attempt of 8 is scored yet"
    for second, (name, solved) in enumerate([("a", True), ("b", False), ("b", False), ("c", False), ("d", True)]):
        progress.see(scored(name, solved=solved, purpose=Purpose.evaluate, version=7), NOW + 100 * second)
    progress.see(scored("old", solved=True, purpose=Purpose.evaluate, version=0), NOW)
    progress.see(scored("own", solved=True, purpose=Purpose.train, version=7), NOW)
    assert view.done(NOW) == 4
    assert view.line(NOW + 500).startswith("4 of 8 attempts  solved 50.0% of them")


def test_practice_ends_with_where_it_began_and_where_it_came_to() -> None:
    progress = Progress()
    assert Practice(progress).end() == "ended without a step after 0 attempts"
    for number in range(1, 13):
        progress.see(step(number, 0.2 if number <= 6 else 0.4), NOW + number)
    end = Practice(progress).end()
    assert end.startswith("12 steps, 0 attempts")
    assert "solved 20.0% in the first 5 steps, 40.0% in the last 5; age <= 2" in end


def test_an_evaluation_ends_with_the_figures_of_the_table() -> None:
    figures = {"pass_at_1": 0.266, "greedy": 0.21, "problems": 400.0, "samples": 8.0}
    assert (
        evaluation_end({"figures": figures}, 61.2) == "pass@1 26.6%, greedy 21.0%, of 400 problems × 8 attempts in 61 s"
    )


@pytest.mark.parametrize("where", [{"force_terminal": False}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}])
def test_where_no_bar_can_move_the_figures_come_as_plain_lines(where: dict[str, Any]) -> None:
    async def scenario(console: Console) -> None:
        async with watching(console, "held-out, before", 8, Evaluation(Progress(), 0, 8)):
            await asyncio.sleep(0.05)

    out = io.StringIO()
    asyncio.run(scenario(Console(file=out, **where)))
    assert out.getvalue() == "held-out, before: no attempt of 8 is scored yet\n"


@pytest.mark.parametrize(("hardness", "note"), [(True, "held-out ones, drawn by hardness)"), (False, "held-out ones)")])
def test_the_plot_says_that_practice_is_on_other_problems_and_counts_ages_in_whole_steps(
    hardness: bool, note: str
) -> None:
    progress = Progress()
    for number in range(1, 8):
        progress.see(step(number, 0.3), NOW + 60 * number)
    figures = {key: 0.3 for key in ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "first_edit", "best_of_k")} | {
        "k": 2.0
    }
    evaluation = {
        "figures": {**figures, "tokens_per_solved": 9.0, "problems": 4, "samples": 2, "infrastructure_errors": 0},
        "problems": {},
    }
    config = RunConfig(
        run="r", base=REF, pack=REF, pack_hidden=REF, schedule=ScheduleConfig(hardness_sampling=hardness)
    )
    outcome = Outcome(DemoOptions(), config, evaluation, evaluation, progress, audit={}, prepared_s=0.0)
    practice, _, ages = plot(outcome).axes
    assert practice.get_xlabel().endswith(note)
    assert ages.get_yticks().tolist() == [0, 1, 2, 3]


def test_practice_shows_its_gain_as_soon_as_it_is_known() -> None:
    progress = Progress()
    progress.see(step(1, 0.3), NOW)
    assert "gain" not in Practice(progress).line(NOW) + Practice(progress).end()
    for number, gain in ((2, 0.02), (3, 0.06)):
        one = step(number, 0.3)
        progress.see(msgspec.structs.replace(one, metrics={**one.metrics, "solved_gain": gain}), NOW)
    assert "solved 30.0%  gain +4.0  " in Practice(progress).line(NOW)
    assert "at equal difficulty gain +4.0 points" in Practice(progress).end()
