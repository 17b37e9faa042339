"""`etude runs --history`: words, who said them, what the scheduler answered, and what it said by itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from etude.history import NONE, History
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import Ref
from tests.unit.etude.test_run_commands import A, B, folder

REF = Ref(key=f"runs/{A}/config.json", size=1, checksum="0" * 32)


def word(action: Any, by: str = "ann, etude", number: int = 0, **more: Any) -> m.RunControl:
    return m.RunControl(run=A, action=action, by=by, number=number, **more)


def told(*messages: Any) -> list[tuple[str, str, str, str]]:
    history = History(A)
    for at, message in enumerate(messages):
        history.hear(message, at)
    return [(one.who, one.what, one.answer, one.reason) for one in history.entries]


def test_each_word_has_its_author_its_reason_and_the_state_that_the_scheduler_answered() -> None:
    assert told(
        word("start", config=REF),
        word("pause", reason="tea", drain=False),
        word("pause", "ben, console"),
        word("pause", number=5, reason="tea"),
        word("pause", "ben, console", number=6, reason="tea"),
        word("pause", "ben, console", number=6, reason="tea"),  # said once more
        word("rollback", serial=3, id="x"),
    ) == [
        ("ann, etude", f"start with runs/{A}/config.json", "", ""),
        ("ann, etude", "pause, without training what is complete", "paused", "tea"),
        ("ben, console", "pause", "paused", ""),
        ("ann, etude", "roll back to version 3", "", ""),
    ]


def test_a_word_that_changed_nothing_shows_the_state_that_held_and_one_that_nobody_heard_has_no_answer() -> None:
    assert told(word("resume"), word("finished", number=8), word("pause")) == [
        ("ann, etude", "resume", "finished", ""),
        ("ann, etude", "pause", NONE, ""),
    ]


def test_what_the_scheduler_says_by_itself_alerts_and_promotions_are_among_them() -> None:
    assert told(
        m.Alert(run=A, name="quota_exceeded", severity="critical", what="too much", examples=["x"]),
        word("pause", m.BY_SCHEDULER, 5, reason="alert quota_exceeded: too much"),
        word("pause", m.BY_SCHEDULER, 6, reason="alert quota_exceeded: too much"),
        m.PolicyPromoted(run=A, serial=4, by="ann", reason="release"),
        m.PolicyPromoted(run=B, serial=4, by="ann"),
    ) == [
        ("", "alert quota_exceeded (critical)", "", "too much; x"),
        ("scheduler", "is paused", "", "alert quota_exceeded: too much"),
        ("ann", "promote version 4", "", "release"),
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_tells_it_beside_a_real_scheduler(tmp_path: Path, platform_stores: None, as_json: bool) -> None:
    async def story() -> None:
        async with folder(tmp_path) as here:
            await here.start(A)
            for words in (["pause", "--reason", "[tea]"], ["resume"], ["stop"]):
                assert (await here.etude(*words)).exit_code == 0
            await here.say(t.POLICIES_PROMOTED, m.PolicyPromoted(run=A, serial=0, by="ann"))
            done = await here.etude("runs", "--history", A, *(["--json"] if as_json else []))
            assert done.exit_code == 0, done.output
            if as_json:
                found = [(row["what"], row["answer"], row["reason"]) for row in json.loads(done.stdout)]
                assert found[1:4] == [("pause", "paused", "[tea]"), ("resume", "running", ""), ("stop", "stopping", "")]
                assert {"is finished", "promote version 0"} <= {what for what, _, _ in found}
            else:
                assert "[tea]" in done.stdout
            unknown = await here.etude("runs", "--history", "r-x")
            assert (unknown.exit_code, "run 'r-x': not known here" in unknown.output) == (1, True)

    asyncio.run(story())
