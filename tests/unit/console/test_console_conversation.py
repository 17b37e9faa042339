"""An attempt as a conversation: in compact-1 and in ChatML, on a function and on a repository."""

from __future__ import annotations

import asyncio
import re

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from services.console.arguments import arguments
from services.console.conversation import between, conversation
from services.console.excerpts import LEAST, MAX_CHARS, Room
from services.console.transcript import CONTINUES, HALF, MASK, tokens, versions
from shared.contracts.trajectory import Segment, Span, unpack
from shared.problems.pack import decompress
from tests.unit.console import repository_attempt as ra
from tests.unit.console.conftest import RUN
from tests.unit.console.repository_attempt import repository
from tests.unit.console.serving import Page, console

__all__ = ["repository"]  # a fixture

SECRET = "AKIA" + "QRSTUVWXYZ234567"


@pytest.fixture
def page(repository, tmp_path) -> Page:
    async def scenario():
        async with console(repository, tmp_path) as there:
            return await there.get(f"/runs/{RUN}/attempts/a-3")

    status, _, found = asyncio.run(scenario())
    assert status == 200
    return found


def said_of(repository, attempt: str = "a-3"):
    trajectory = unpack(repository.objects.get(repository.scored(attempt, version=3, solved=True).trajectory))
    return trajectory, conversation(trajectory.segments, repository.chat, repository.brief())


def test_an_attempt_in_the_compact_format_reads_as_turns_with_calls_and_their_answer(world):
    trajectory = unpack(world.objects.get(world.trajectory("a-0", 3)))
    ((prompt, first, second),) = conversation(trajectory.segments, world.chat, None)
    assert (prompt.title, prompt.sampled, first.turn, second.turn) == ("prompt", False, 1, 2)
    edit, test = first.calls
    assert (edit.tool, edit.arguments[0].value, test.tool) == ("edit", "3", "test")
    replaced = edit.arguments[1]
    assert "return a - 1".replace(replaced.old, replaced.new, 1) == "return a + 1"
    assert "<obs>" in first.answer.text.head  # of the turn: the format answers its last call alone
    assert second.calls[0].broken
    assert second.calls[0].error
    assert (second.broken, first.sampled, first.versions) == (True, True, (3,))
    assert versions(trajectory.segments[0]) == [3]


def test_every_turn_has_its_thinking_text_calls_and_results(repository):
    _, (first, second) = said_of(repository)
    prompt, look, edit, broken, shell, two, _asked, summary = first
    assert [p.label for p in prompt.passages] == [
        "system, 1 line",
        "user, 3 lines",
        "as the engine read it, with tools",
    ]
    assert prompt.passages[1].text.head == ra.PROMPT.strip()
    assert [p.text.head for p in look.passages[:2]] == [
        "First look at where wallets are used.\nThen read the class.",
        "I look around. 财布 👛",
    ]
    assert [p.open for p in look.passages] == [False, True, False]
    assert (look.calls[0].tool, look.calls[0].answer.text.head) == ("grep", ra.TURNS[0][1][0])
    assert look.calls[1].answer.text.head == ra.TURNS[0][1][1].rstrip("\n")
    assert look.answer is None
    (change,) = edit.calls[0].arguments[1:]
    assert ("del", "-        self.amount += amount * RATES[currency]") in change.lines
    assert ("add", "+            raise KeyError(currency)") in change.lines
    assert (broken.broken, broken.calls[0].broken, broken.calls[0].tool) == (True, True, "shell")
    output = shell.calls[0].answer.text
    assert output.folded == "73 more lines"
    assert output.tail.endswith("[exit code 1]")
    assert f"{output.head}\n{output.middle}\n{output.tail}" == ra.PYTEST
    assert output.lines == ra.PYTEST.count("\n") + 1
    assert [(call.ok, call.broken) for call in two.calls] == [(False, False), (True, False)]
    assert (summary.title, summary.passages[0].text.head) == ("summary", ra.SUMMARY)
    task, test, last = second
    assert [p.open for p in task.passages] == [False, False, False, True]
    assert task.passages[3].text.head == ra.SUMMARY
    assert (test.calls[0].answer.passed, test.versions) == (True, (4,))
    assert (last.passages[0].text.head, last.calls[0].tool) == ("Done, and the tests pass.", "submit")


def test_each_token_is_in_one_block_and_each_span_has_a_place_that_links_can_point_to(repository):
    trajectory, said = said_of(repository)
    for segment, blocks in zip(trajectory.segments, said, strict=True):
        places = {b.start for b in blocks} | {a for b in blocks for a in b.anchors}
        places |= {call.anchor for b in blocks for call in b.calls}
        assert {span.start for span in segment.spans} <= places
        starts = [block.start for block in blocks]
        assert starts == sorted({0, *starts})


def test_the_page_shows_the_conversation_the_changes_and_the_problem(page):
    for text in (
        "Paying from a wallet",
        "7 tools: read, edit",
        "turns 40",
        "pip install -e .",
        "thinking, 2 lines",
        "73 more lines",
    ):
        assert text in page.text
    for text in ("new", "executable", "deleted", "binary", "320 bytes", "- [ ] test"):
        assert text in page.text
    assert "+        self.amount -= self._converted(amount, currency)" in page.text
    assert "_to_pass" not in page.html
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    (link,) = {a["href"] for tag, a in page.elements if tag == "a" and re.fullmatch(r"#s0-\d+", a.get("href") or "")}
    assert link[1:] in ids


def test_what_an_agent_wrote_is_escaped_and_named(page):
    assert "<script>alert(1)</script> ⟨ESC⟩[2J⟨ESC⟩]0;owned⟨BEL⟩ ⟨U+202E⟩gnp.exe ⟨U+200B⟩{{7*7}} '\"&" in page.text
    assert [a.get("src") for tag, a in page.elements if tag == "script"] == ["/static/console.js"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", page.html)


def test_without_the_tree_the_page_says_so_and_shows_what_was_submitted(repository, tmp_path):
    tree = repository.state / "objects" / repository.problem.tree.key
    kept = tree.read_bytes()
    tree.unlink()
    try:

        async def scenario():
            async with console(repository, tmp_path) as there:
                return await there.get(f"/runs/{RUN}/attempts/a-2")

        status, _, found = asyncio.run(scenario())
    finally:
        tree.write_bytes(kept)
    assert status == 200
    assert "files before the attempt: ValueError: kind 'repository'" in found.text
    assert "what it was before cannot be read" in found.text
    assert "+        self.amount -= self._converted(amount, currency)" in found.text


def test_an_attempt_of_a_kind_that_is_not_known_here_is_shown_without_its_problem(repository, tmp_path):
    objects, place = repository.objects, repository.objects.head(f"runs/{RUN}/config.json")
    line = decompress(objects.get(repository.config.pack)).replace(b'"repository"', b'"puzzle"')
    pack = objects.put("packs/puzzles", zstandard.compress(line))
    objects.put(place.key, msgspec.json.encode(msgspec.structs.replace(repository.config, pack=pack)))

    async def scenario():
        async with console(repository, tmp_path) as there:
            return await there.get(f"/runs/{RUN}/attempts/a-1")

    try:
        status, _, found = asyncio.run(scenario())
    finally:
        objects.put(place.key, msgspec.json.encode(repository.config))
    assert status == 200
    assert "problem: PackError: pack: line 1: field 'kind': found 'puzzle'" in found.text
    assert "self.amount -= self._converted" in found.text


def test_a_renderer_that_fails_leaves_the_turn_as_it_was_sampled(repository):
    class Failing:
        text, stop_tokens = staticmethod(repository.chat.text), ()

        def reading(self, *_):
            raise RuntimeError("somebody else's")

        answers = kept = reading

    trajectory, _ = said_of(repository)
    said = conversation(trajectory.segments, Failing(), None)
    assert "<tool_call>" in said[0][1].passages[0].text.head
    assert ra.TURNS[0][1][0] in said[0][1].answer.text.head


@given(
    st.lists(st.text("ab<>\n", max_size=8), min_size=1, max_size=4), st.text("ab<>\n", max_size=12), st.integers(0, 4)
)
def test_results_are_found_where_the_frame_has_them_or_not_at_all(bodies, text, cut):
    marks = [f"qz{i}zq" for i in range(len(bodies))]
    frame, whole = ["[" + "|=|".join(some) + "]end" for some in (marks, bodies)]
    assert between(whole[: len(whole) - cut], frame, marks) == bodies
    found = between(text, frame, marks)
    assert found is None or len(found) == len(marks)


def test_results_that_could_be_told_apart_in_two_ways_are_left_together():
    assert between("[a|b|c]", "[1|2]", ["1", "2"]) is None
    assert between("[a|b]", "[1|2]", ["1", "2"]) == ["a", "b"]
    assert between("[ab]", "[12]", ["1", "2"]) is None


def test_short_arguments_stand_in_the_line_and_long_ones_below():
    room = Room()
    found = arguments({"path": "a.py", "content": "x\ny", "count": 3, "deep": {"a": [1, None]}}, room)
    assert [(a.name, a.value) for a in found[:3]] == [("path", "a.py"), ("count", "3"), ("deep", '{"a": [1, null]}')]
    assert found[3].text.head == "x\ny"
    (patch,) = arguments({"patch": "--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y"}, room)
    assert [kind for kind, _ in patch.lines][-2:] == ["del", "add"]
    (only,) = arguments({"old": "x", "new": 3}, room)[:1]
    assert only.old is None  # no text that replaces another


def test_long_texts_are_bounded_and_a_secret_at_the_cut_is_masked():
    for at in range(MAX_CHARS - 30, MAX_CHARS + 5):
        text = ("x " * MAX_CHARS)[:at] + f" {SECRET} " + "y" * 100
        shown = Room().excerpt(text)
        assert not any(SECRET[:n] in shown.head + shown.middle for n in (8, 12, 20))
        assert len(shown.head + shown.middle) <= MAX_CHARS
    room = Room(1000)
    assert [len(room.excerpt("a" * 900).head) for _ in range(3)] == [900, LEAST, LEAST]


def test_a_text_is_folded_in_its_middle_with_the_number_of_lines():
    text = "\n".join(str(n) for n in range(100))
    shown = Room().excerpt(text, head=3, tail=2)
    assert (shown.head, shown.tail, shown.folded) == ("0\n1\n2", "98\n99", "95 more lines")
    assert Room().excerpt("z" * 9000).folded.endswith("more characters")
    assert Room().excerpt("one\ntwo\n").folded == ""


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[CONTINUES, HALF, MASK]), max_size=30))
def test_characters_that_tokens_cut_are_shown_whole(repository, text):
    ids = repository.chat.vocabulary.plain(text)
    T = len(ids)
    segment = Segment(
        tokens=np.array(ids, np.int32),
        loss_mask=np.zeros(T, bool),
        logprobs=np.zeros(T, np.float32),
        versions=np.full(T, -1, np.int32),
        oldest_kv_version=0,
    )
    shown = tokens(segment, repository.chat, 0, T)
    assert [t.id for t in shown] == ids
    assert "".join(t.text for t in shown if t.text != CONTINUES) == repository.chat.text(ids)
    assert all(bool(t.part) == (t.text == CONTINUES) or t.part.startswith("1 of") for t in shown)


def test_a_page_of_tokens_may_begin_within_a_character(repository):
    ids = repository.chat.vocabulary.plain("財👛 " * 5)
    segment = Segment(
        tokens=np.array(ids, np.int32),
        loss_mask=np.zeros(len(ids), bool),
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.full(len(ids), -1, np.int32),
        oldest_kv_version=0,
        spans=[Span(start=0, end=len(ids), role="prompt")],
    )
    whole = tokens(segment, repository.chat, 0, len(ids))
    for first in range(len(ids)):
        assert tokens(segment, repository.chat, first, 3) == whole[first : first + 3]
    assert {t.text for t in whole} <= {"財", "👛", " ", CONTINUES, "👛 ", "財👛", "財👛 "}
