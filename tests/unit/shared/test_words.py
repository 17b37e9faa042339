"""Whatever is said twice, late or anew: readers of `runs.control` end where the scheduler is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.messages import BY_SCHEDULER, RunControl
from shared.contracts.words import Words


def said(action: str, number: int = 0) -> RunControl:
    return RunControl(run="r", action=action, number=number, by=BY_SCHEDULER if number else "alice")  # type: ignore[arg-type]


def ends(words: list[RunControl], reader: Words) -> str:
    return [word.action for word in words if reader.count(word)][-1]


def test_an_old_end_after_a_new_beginning_is_known_to_be_old() -> None:
    log = [said("finished", 7), said("resume"), said("resume", 9), said("finished", 7)]
    assert ends(log, Words()) == "resume"


def test_runs_are_counted_apart() -> None:
    words = Words()
    assert words.count(said("finished", 7))
    assert words.count(RunControl(run="other", action="finished", number=3))


def test_a_number_of_the_future_silences_nobody() -> None:
    words = Words(clock=lambda: 1_000.0)
    assert words.count(said("finished", 1_000_000))
    assert words.count(said("pause", 1 << 50))
    assert words.count(said("resume", 1_000_001))
    assert not words.count(said("finished", 1_000_000))


@given(st.data())
def test_whoever_hears_everything_again_ends_with_the_schedulers_last_word(data: st.DataObject) -> None:
    """Each word of a person is answered; old answers come again anywhere after themselves; a reader may begin anew."""
    actions = data.draw(st.lists(st.sampled_from(["pause", "resume", "stop"]), min_size=1, max_size=8))
    log: list[RunControl] = []
    answers: list[RunControl] = []
    for number, action in enumerate(actions, 1):
        log.append(said(action))
        answers.append(said(action, number))
        log.append(answers[-1])
        log += data.draw(st.lists(st.sampled_from(answers), max_size=3))
    reader = Words()
    assert ends(log, reader) == actions[-1]
    assert ends(log, reader) == actions[-1]
