"""`etude runs --history`: commands, who gave them, what the scheduler answered, and what it decided by itself."""

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
from tests.ruling import status
from tests.unit.etude.test_run_commands import A, B, folder

REF = Ref(key=f"runs/{A}/config.json", size=1, checksum="0" * 32)


def command(action: Any, by: str = "ann, etude", **more: Any) -> m.RunCommand:
    return m.RunCommand(run=A, action=action, by=by, **more)


def answer(state: str, at: float, since: float, to: m.RunCommand | None = None, **more: Any) -> m.RunStatus:
    """`at`, `since`: seconds."""
    return status(A, state, number=int(1000 * at), since=since, answers=to.id if to else "", **more)


def told(*messages: Any) -> list[tuple[str, str, str, str]]:
    """Each said a second after the one before it."""
    history = History(A)
    for at, message in enumerate(messages):
        history.hear(message, at)
    return [(one.who, one.what, one.answer, one.reason) for one in history.entries]


def test_each_command_has_its_author_its_reason_and_the_state_that_the_scheduler_answered() -> None:
    start, tea, again = (
        command("start", config=REF),
        command("pause", reason="tea", drain=False),
        command("pause", "ben"),
    )
    back = command("rollback", serial=3)
    answers = [
        answer("running", 4.0, 4.0, start),
        answer("paused", 5.0, 5.0, tea, reason="tea"),
        answer("paused", 6.0, 5.0, again, reason="tea"),
        answer("paused", 6.0, 5.0, again, reason="tea"),  # said once more
        answer("paused", 7.0, 5.0, back, reason="tea"),
    ]
    expected = [
        ("ann, etude", f"start with runs/{A}/config.json", "running", ""),
        ("ann, etude", "pause, without training what is complete", "paused", "tea"),
        ("ben", "pause", "paused", ""),
        ("ann, etude", "roll back to version 3", "paused", ""),
    ]
    assert told(start, tea, again, back, *answers) == expected
    assert told(start, tea, again, back, *answers[::-1]) == expected  # the topics have no order among each other


def test_a_command_that_changed_nothing_shows_the_state_that_held_and_one_that_nobody_heard_has_no_answer() -> None:
    resume, pause = command("resume"), command("pause")
    assert told(resume, pause, answer("finished", 0.5, 0.1, resume)) == [
        ("ann, etude", "resume", "finished", ""),
        ("ann, etude", "pause", NONE, ""),
    ]


def test_of_what_was_compacted_away_no_answer_is_told_and_none_is_missed() -> None:
    assert told(command("pause"), command("resume"), answer("running", 9.0, 5.0, by="ann, etude")) == [
        ("ann, etude", "pause", "", ""),
        ("ann, etude", "resume", "", ""),
        ("ann, etude", "is running", "", ""),
    ]


def test_what_the_scheduler_decides_by_itself_alerts_and_promotions_are_among_them() -> None:
    why = "alert quota_exceeded: too much"
    assert told(
        m.Alert(run=A, name="quota_exceeded", severity="critical", what="too much", examples=["x"]),
        answer("paused", 1.0, 1.0, reason=why),
        answer("paused", 2.0, 1.0, reason=why),
        m.PolicyPromoted(run=A, serial=4, by="ann", reason="release"),
        m.PolicyPromoted(run=B, serial=4, by="ann"),
    ) == [
        ("", "alert quota_exceeded (critical)", "", "too much; x"),
        ("scheduler", "is paused", "", why),
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
