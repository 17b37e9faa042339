"""Runs side by side: shared axes, differing fields, end figures."""

from __future__ import annotations

import asyncio

import msgspec

from services.console.board import Board
from services.console.comparison import differing, outcomes
from services.console.curves import curves, together
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import LengthPenalty
from tests.ruling import status
from tests.unit.console.conftest import HOSTILE, RUN
from tests.unit.console.serving import console

OTHER = "r-20260102T000000-beef"


def renamed(message: msgspec.Struct, run: str) -> msgspec.Struct:
    return msgspec.structs.replace(message, run=run)


def test_only_fields_that_differ_are_named_and_objects_differ_by_what_they_are_not_by_where_they_lie(world):
    one = world.config
    moved = msgspec.structs.replace(one.base, key="elsewhere")
    two = msgspec.structs.replace(one, run=OTHER, base=moved, seed=7)
    assert differing([one, two]) == [("seed", ["1", "7"])]
    assert differing([one, one]) == []
    without = msgspec.structs.replace(two, reward=msgspec.structs.replace(two.reward, length=None))
    names = [name for name, _ in differing([one, without])]
    assert {"seed", "reward.length.weight", "reward.length.token_weights.thinking"} <= set(names)
    assert len(names) == 1 + len(LengthPenalty.__struct_fields__) - 1 + len(LengthPenalty().token_weights)
    assert differing([one, None, two]) == [("seed", ["1", "unknown", "7"])]


def test_runs_share_axes_and_keep_their_colour_where_one_lacks_a_curve(world):
    board = Board(100)
    for _, _, message in world.messages:
        board.apply(message)
    metrics = {"entropy": 0.5, "only_here": 1.0, "seconds_train": 2.0}
    board.apply(m.StepCommitted(run=OTHER, incarnation=0, step=1, serial=1, groups={}, metrics=metrics))
    runs = [board.runs[RUN], board.runs[OTHER]]
    shared = {curve.title: curve for curve in together(runs)}
    assert [series.name for series in shared["Only here"].series] == [RUN, OTHER]
    assert [list(series.points) for series in shared["Only here"].series] == [[], [(1, 1.0)]]
    assert len(shared["Entropy"].series[0].points) == 3
    assert {"Seconds, fetch", "Seconds, train"} <= set(shared)
    alone = {curve.title for curve in curves(runs[0])} - {"Seconds"}
    assert alone <= set(shared)


def test_end_figures_stand_beside_each_other(world):
    board = Board(100)
    for _, _, message in world.messages:
        board.apply(message)
    report = world.config.base
    board.apply(m.EvalFinished(run=RUN, eval="after", serial=3, report=report, figures={"pass_at_1": 0.5}))
    board.apply(status(OTHER))
    rows = dict(outcomes([board.runs[RUN], board.runs[OTHER]]))
    assert rows["steps"] == ["3", "0"]
    assert rows["last evaluation"] == ["after, version 3", "–"]
    assert rows["its pass_at_1"] == ["0.5", "–"]
    assert rows["solved, last attempts"] == ["50.0 %", "–"]


def test_the_page_compares_offers_and_says_what_is_missing(world, tmp_path):
    async def scenario():
        async with console(world, tmp_path) as there:
            hostile = HOSTILE.replace("/", "")
            for run in (OTHER, hostile):
                await there.bus.publish(t.RUNS_STATE, run, status(run))
            while hostile not in there.board.runs:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            _, _, form = await there.get("/compare")
            offered = [a["value"] for tag, a in form.elements if a.get("type") == "checkbox"]
            assert sorted(offered)[1:] == [RUN, OTHER]
            _, _, both = await there.get("/compare", params=[("run", RUN), ("run", OTHER)])
            assert f"The configuration of {OTHER} cannot be read." in both.text
            assert "What came of them" in both.text
            assert both.html.count("<svg") >= 8
            _, _, three = await there.get("/compare", params=[("run", RUN), ("run", hostile), ("run", "none")])
            assert "No message speaks of none." in three.text
            for _, _, page in [(0, 0, form), (0, 0, both), (0, 0, three)]:
                assert "<script>alert" not in page.html
                assert "\x1b" not in page.html
                assert "\u202e" not in page.html
            code, _, _ = await there.get("/compare", params=[("run", str(i)) for i in range(50)])
            assert code == 200

    asyncio.run(scenario())
