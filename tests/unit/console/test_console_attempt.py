"""One attempt: what its reward was given for, what became of each token, and what is not known is said not to be."""

from __future__ import annotations

import asyncio
import re

import msgspec
import numpy as np
import pytest

from services.console.board import Board
from services.console.evidence import Point, given
from services.console.fate import fate, mismatches
from services.console.library import Library
from services.console.transcript import tokens
from services.reward.behaviour import findings
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.graded import Graded, verdict_key
from shared.contracts.ids import attempt_prefix
from shared.contracts.run import Purpose
from shared.contracts.trajectory import Segment, Span, Trajectory, pack, unpack
from tests.unit.console.conftest import HOSTILE, RUN
from tests.unit.console.serving import Page, console


@pytest.fixture
def visit(world, tmp_path):
    def go(*paths: str) -> list[Page]:
        async def scenario():
            async with console(world, tmp_path) as there:
                return [await there.get(path) for path in paths]

        answers = asyncio.run(scenario())
        assert [status for status, _, _ in answers] == [200] * len(paths)
        return [page for _, _, page in answers]

    return go


def rows(page: Page, head: str) -> list[list[str]]:
    """The texts of the cells of the table whose head begins with `head`."""
    table = next(part for part in re.findall(r"<table>(.*?)</table>", page.html, re.S) if head in part)
    body = re.findall(r"<tr>(.*?)</tr>", table.partition("<tbody>")[2], re.S)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S) for row in body]
    return [[" ".join(Page(cell).text.split()) for cell in row] for row in cells]


def segment_of(world, attempt: str, version: int) -> Segment:
    return unpack(world.objects.get(world.trajectory(attempt, version))).segments[0]


def test_every_term_says_what_it_was_given_for_and_links_to_the_turn(visit, world):
    (page,) = visit(f"/runs/{RUN}/attempts/a-0")
    broken, todo = rows(page, "Term of the reward")
    assert "trajectory: " not in page.text, page.text  # it could be read
    last = segment_of(world, "a-0", 0).spans[-1]
    assert broken[:2] == ["broken tool call", "-0.050"]
    assert broken[2].startswith("turn 2: broken edit <script>alert(1)</script> ⟨ESC⟩")
    assert broken[2].endswith("7 in all")
    assert todo[:2] == ["todo unfinished", "no weight"]
    assert todo[2].endswith("segment 0, tokens 1-2: nowhere")  # no block begins there
    anchors = [attributes.get("id") for tag, attributes in page.elements if tag == "article"]
    assert f"s0-{last.start}" in anchors
    assert f"#s0-{last.start}" in [attributes.get("href") for tag, attributes in page.elements if tag == "a"]
    (solved,) = visit(f"/runs/{RUN}/attempts/a-3")
    length, passed, *_ = rows(solved, "Term of the reward")
    assert length == ["length", "-0.100", "tokens: 20 in tool calls; 2 calls, 2 turns"]
    assert passed == ["solved", "+1.000", "3 of 3 tests, hidden ones among them, passed"]


def test_evidence_as_the_reward_service_writes_it_is_understood(world):
    said = unpack(world.objects.get(world.trajectory("a-1", 1)))
    said.effort = m.Effort(broken_tool_calls=1)
    graded = Graded(verdict=m.Verdict(solved=False, passed=0, total=1), findings=findings(said, {}))
    scored = msgspec.structs.replace(world.scored("a-1", version=1, solved=False), terms={"broken_tool_call": -0.05})
    first, *_ = given(scored, graded, said.segments)
    span = said.segments[0].spans[-1]
    assert first.points == (Point("broken call", 0, span.start, 2),)


def test_without_what_the_grader_found_the_terms_stand_and_the_page_says_so(visit, world):
    trajectory = world.trajectory("a-1", 1)
    key = verdict_key(RUN, m.AttemptKey(attempt="a-1", epoch=1, group="", problem=""), trajectory)
    kept = world.objects.get(world.objects.head(key))
    world.objects.delete(key)
    try:
        (page,) = visit(f"/runs/{RUN}/attempts/a-1")
    finally:
        world.objects.put(key, kept)
    assert "what the grader found: ObjectMissing" in page.text
    assert rows(page, "Term of the reward") == [["broken tool call", "-0.050", "what was found cannot be read"]]


def test_every_token_has_its_probability_version_fate_and_experts(visit, world):
    segment = segment_of(world, "a-3", 3)
    T = len(segment.tokens)
    start = segment.spans[1].start
    (page,) = visit(f"/runs/{RUN}/attempts/a-3?row={start - 2}")
    found = rows(page, "Experts, by MoE layer")
    assert [int(row[0]) for row in found] == list(range(start - 2, min(T, start + 98)))
    assert found[0][2:5] == ["–", "–", "no: context"]
    assert found[2][2:5] == [f"{segment.logprobs[start]:.4f}", "3", "at step 3"]
    assert found[2][5] == f"1: {start % 251} {(start + 1) % 251}2: 251 252"
    (end,) = visit(f"/runs/{RUN}/attempts/a-3?row={T - 1}")
    assert rows(end, "Experts, by MoE layer") == [
        [
            str(T - 1),
            found_text(end),
            f"{segment.logprobs[-1]:.4f}",
            "3",
            "at step 3",
            "none: nothing was read after it",
        ]
    ]
    said = {row[4] for row in rows(visit(f"/runs/{RUN}/attempts/a-3?row={segment.spans[2].start}")[0], "Experts, by")}
    assert "no: tool output" in said
    (beyond,) = visit(f"/runs/{RUN}/attempts/a-3?row=99999999&token=99999999&segment=7")
    assert f"of {T}" in beyond.text


def found_text(page: Page) -> str:
    return rows(page, "Experts, by MoE layer")[0][1]


def test_a_summary_that_stands_in_the_next_context_again_is_told_from_the_one_that_was_sampled():
    T = 6
    mask = np.array([False, False, True, True, False, False])
    spans = [
        Span(start=0, end=1, role="prompt"),
        Span(start=1, end=2, role="summary"),
        Span(start=2, end=4, role="summary", turn=1),
        Span(start=4, end=5, role="tool_output"),
    ]
    segment = Segment(
        tokens=np.arange(T, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(T, np.float32),
        versions=np.where(mask, 1, -1).astype(np.int32),
        oldest_kv_version=1,
        spans=spans,
    )
    again = "summary of the context before, put in again"
    assert [t.given for t in tokens(segment, None, 0, 9)] == ["context", again, "", "", "tool output", "given"]
    assert [t.given for t in tokens(segment, None, 1, 2)] == [again, ""]


def test_what_is_known_of_trainer_against_sampler_is_shown_by_version_and_step(visit):
    trained, waiting = visit(f"/runs/{RUN}/attempts/a-2", f"/runs/{RUN}/attempts/a-0")
    assert rows(trained, "Mismatch k3") == [["2", "2", "1.00e-01", "–"]]
    assert "Its group was trained at step 2." in trained.text
    assert "has trained its group" in waiting.text
    assert "says anything of these versions" in waiting.text


def test_a_group_is_trained_where_the_surviving_lineage_trained_it_and_an_evaluation_never_is(world):
    board = Board(100)
    for _, _, message in world.messages:
        board.apply(message)
    run = board.runs[RUN]
    key = m.AttemptKey(attempt="a", epoch=1, group="g-3", problem="p-1")
    assert fate(run, key).step == 3
    assert mismatches(run.steps, [1, 2, 3], None)[0] == mismatches(run.steps, [1], 1)[0]
    board.apply(m.IncarnationStarted(run=RUN, incarnation=1, step=2, parent=0))
    assert fate(run, key).step is None
    assert fate(run, msgspec.structs.replace(key, group="g-2")).step == 2
    evaluated = msgspec.structs.replace(key, group="g-2", purpose=Purpose.evaluate)
    assert (fate(run, evaluated).step, fate(run, evaluated).told) == (None, "no: evaluation")


def test_routing_that_is_gone_or_damaged_or_named_by_a_path_is_said_and_the_rest_is_shown(world, tmp_path):
    kept = unpack(world.objects.get(world.trajectory("gone", 3)))
    hostile = "../../../../escaped"
    refs = {
        "gone": msgspec.structs.replace(kept.routing, key="runs/none"),
        "damaged": world.objects.put("runs/damaged", b"no routing"),
        "escaping": msgspec.structs.replace(kept.routing, checksum=hostile),
    }

    async def scenario():
        async with console(world, tmp_path) as there:
            for name, ref in refs.items():
                key = m.AttemptKey(attempt=name, epoch=1, group=HOSTILE, problem="p-1")
                said = Trajectory(
                    key=key,
                    stop=kept.stop,
                    temperature=1.0,
                    effort=kept.effort,
                    segments=kept.segments,
                    routing=ref,
                )
                put = world.objects.put(f"{attempt_prefix(RUN, name, 1)}/trajectory-1.safetensors.zst", pack(said))
                scored = msgspec.structs.replace(world.scored(name, version=3, solved=True), key=key, trajectory=put)
                await there.bus.publish(t.ROLLOUTS_SCORED, name, scored)
            while not set(refs) <= set(there.board.runs[RUN].attempts):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return {name: (await there.get(f"/runs/{RUN}/attempts/{name}"))[2] for name in refs}

    for name, page in asyncio.run(scenario()).items():
        assert "routed experts: " in page.text, name
        assert rows(page, "Log-probability")[0][4] == "no: context"
    assert not list(tmp_path.parent.rglob("escaped*"))


@pytest.mark.parametrize(("room", "kept"), [(3.5, 3), (0, 1)])
def test_routing_is_kept_on_the_disk_while_there_is_room_and_the_last_is_always(world, tmp_path, room, kept):
    attempts = [unpack(world.objects.get(world.trajectory(f"kept-{i}", 3))) for i in range(6)]
    most = int(room * attempts[0].routing.size)
    library = Library(world.objects, tmp_path / "cache" / "formats", most)
    for said in [*attempts, attempts[-1]]:
        assert library.experts(said.routing, 0, 5, 2).tolist() == [[[5, 6], [251, 252]], [[6, 7], [251, 252]]]
    assert len(list((tmp_path / "cache" / "routing").iterdir())) == kept
