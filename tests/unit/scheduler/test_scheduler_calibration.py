"""What was predicted of groups against what became of them, why a problem is drawn, and floors of categories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine
from typer.testing import CliRunner

from services.scheduler import measures, problem_cli
from services.scheduler.calibration import Calibration, Prediction, report, silent
from services.scheduler.catalogue import Catalogue
from services.scheduler.hardness import CATEGORY_FLOOR, UNIFORM_STEPS, Hardness, Outcome
from services.scheduler.standing import Standing
from services.scheduler.why import sentences
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.test_scheduler_recovery import finish
from tests.unit.scheduler.world import RUN


def test_the_error_is_the_distance_of_what_was_predicted_from_what_came_weighted_by_attempts() -> None:
    found = report([Prediction(0.25, 0.0, 8, 2), Prediction(0.95, 0.0, 8, 4), Prediction(0.92, 0.0, 8, 8)])
    assert [(one.groups, one.attempts) for one in found.bins] == [(1, 8), (2, 16)]
    assert found.error == pytest.approx((8 * 0.0 + 16 * abs(0.935 - 0.75)) / 24)
    assert report([]).bins == ()


@settings(max_examples=50)
@given(st.floats(0.01, 0.99), st.floats(0.01, 0.95), st.integers(2, 16))
def test_the_chance_of_a_silent_group_lies_between_independent_attempts_and_equal_ones(
    chance: float, spread: float, attempts: int
) -> None:
    alone = chance**attempts + (1 - chance) ** attempts
    assert alone - 1e-9 <= silent(chance, spread, attempts) <= 1.0 + 1e-9


def test_groups_without_a_signal_are_predicted_from_how_much_problems_of_one_chance_differ() -> None:
    rng, found = np.random.default_rng(3), Calibration()
    for _ in range(2000):
        found.add(0.4, 8, int(rng.binomial(8, rng.beta(0.8, 1.2))))
    shown = report(found.newest)
    assert found.spread == pytest.approx(1 / 3, abs=0.05)  # of Beta(0.8, 1.2)
    assert shown.silent_predicted == pytest.approx(shown.silent, abs=0.05)


def test_no_group_helps_to_predict_itself_and_effort_moves_no_prediction() -> None:
    short, long = Hardness(), Hardness()
    for hardness, turns in ((short, 1.0), (long, 50.0)):
        for solved in (8, 0, 8):
            hardness.observe(Outcome("debugging", f"cell-{solved}", 8, solved, turns * (1 + solved), 10.0, 0))
    first = short.calibration.newest[0]
    assert first.chance == pytest.approx(0.3)
    assert [p.chance for p in short.calibration.newest] == pytest.approx([p.chance for p in long.calibration.newest])


def test_a_run_begins_with_uniform_draws_and_no_category_is_starved() -> None:
    hardness, catalogue = Hardness(), Catalogue()
    rows = [
        (f"{top}-{i}", f"{top}/tag", f"{top}-cell-{i // 10}", "pack")
        for top in ("hopeless", "even")
        for i in range(200)
    ]
    catalogue.add(rows)
    for _ in range(60):
        hardness.observe(Outcome("hopeless/tag", "hopeless-cell-0", 8, 0, 3.0, 20.0, 0))
        hardness.observe(Outcome("even/tag", "even-cell-0", 8, 4, 3.0, 20.0, 0))

    def share(step: int) -> float:
        kinds = catalogue.kinds(hardness)
        places = np.bincount(catalogue.places(kinds), minlength=len(kinds))
        mass = catalogue.weights(hardness, step=step) * places
        return float(
            sum(m for m, (category, _) in zip(mass, kinds, strict=True) if category == "hopeless/tag") / mass.sum()
        )

    assert share(0) == pytest.approx(0.5)
    assert share(0) > share(3) > share(int(UNIFORM_STEPS))
    assert share(200) >= 0.5 * CATEGORY_FLOOR / (1 + CATEGORY_FLOOR) - 1e-9


def test_the_predictions_of_a_run_are_the_same_after_a_restart(engine: Engine) -> None:
    room = Room(engine).begin(problems=40)
    for _ in range(3):
        finish(room)
    before = list(room.ws.hardness.calibration.newest)
    assert len(before) == 3
    loaded = room.desk.store.load(RUN, room.now)
    assert loaded is not None
    assert list(loaded.hardness.calibration.newest) == before
    measures.measure(room.desk.sets, set())
    assert measures.CALIBRATION.labels(RUN, "groups")._value.get() == 3
    measures.measure({}, {RUN})


def test_why_says_in_sentences_what_became_of_a_problem_and_what_it_is_drawn_for(engine: Engine) -> None:
    room = Room(engine).begin(problems=40)
    ready = room.ws.announced[finish(room)]
    standing = Standing(room.ws)
    text = "\n".join(sentences(standing.why(ready, lambda names: {})))
    assert "waits for the trainer" in text
    free = next(one for one in room.ws.catalogue.ids if room.ws.catalogue.free_ones()[room.ws.catalogue.handle(one)])
    found = standing.why(free, lambda names: {})
    text = "\n".join(sentences(found))
    assert "It is free" in text
    assert "times that of an average free problem" in text
    assert "partly uniform" in text
    assert found.relative == pytest.approx(1.0)  # step 0
    with pytest.raises(KeyError):
        standing.why("nobody's", lambda names: {})


def test_the_commands_read_the_ledger_and_refuse_what_is_not_there(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(engine).begin(problems=40)
    problem = room.ws.announced[finish(room)]
    monkeypatch.setenv("ETUDE_LEDGER", str(engine.url))
    run = CliRunner()
    state = ["--state", str(tmp_path / "state")]
    told = run.invoke(problem_cli.app, ["why", problem, RUN, *state])
    assert told.exit_code == 0, told.output
    assert "chance of" in told.output
    assert run.invoke(problem_cli.app, ["why", "nobody's", RUN, *state]).exit_code == 2
    picture = tmp_path / "calibration.png"
    told = run.invoke(problem_cli.app, ["calibration", RUN, *state, "--picture", str(picture)])
    assert told.exit_code == 0, told.output
    assert "expected calibration error" in told.output
    assert picture.read_bytes().startswith(b"\x89PNG")
