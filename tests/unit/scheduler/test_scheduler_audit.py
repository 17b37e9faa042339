"""The audit finds each kind of damage, names the rows, and says so by its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from services.scheduler.audit import UnknownRun, audit
from services.scheduler.cli import app
from shared import objects as stores
from tests.unit.scheduler.ledgers import opened, unguarded
from tests.unit.scheduler.world import RUN, World, config

AN_OPEN_ATTEMPT = "(SELECT min(attempt_id) FROM attempts WHERE state = 'grouped')"
A_TRAINED_GROUP = "(SELECT min(group_id) FROM trained)"


@pytest.fixture
def finished(engine: Engine) -> Engine:
    world = World(engine, config(max_steps=4))
    world.start()
    world.run_until("finished")
    return engine


def damage(engine: Engine, *statements: str) -> None:
    unguarded(engine)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def test_a_sound_run_has_no_findings(finished: Engine) -> None:
    report = audit(finished, RUN, max_staleness=2)
    assert report.sound
    assert report.summary() == "0 lost, 0 trained twice, 0 staleness violations"
    assert report.counts == {
        "rollouts.requested": 48,
        "rollouts.finished": 48,
        "rollouts.scored": 48,
        "groups.ready": 12,
        "steps.committed": 4,
    }


@pytest.mark.parametrize(
    ("check", "statements"),
    [
        (
            "trained_twice",
            [
                "DROP INDEX uq_groups_problem_alive",
                f"UPDATE groups SET problem_id = (SELECT problem_id FROM groups WHERE group_id = {A_TRAINED_GROUP}), number = 2 "
                "WHERE group_id = (SELECT max(group_id) FROM trained)",
            ],
        ),
        ("lost", [f"UPDATE groups SET announced = NULL WHERE group_id = {A_TRAINED_GROUP}", "DELETE FROM trained"]),
        ("lost", [f"UPDATE attempts SET state = 'claimed' WHERE attempt_id = {AN_OPEN_ATTEMPT}"]),
        ("staleness", ["UPDATE policies SET step = step - 3"]),
        ("staleness", [f"UPDATE trained SET reported_age = 3 WHERE group_id = {A_TRAINED_GROUP}"]),
        ("attempts", [f"UPDATE attempts SET epoch = 1 WHERE attempt_id = {AN_OPEN_ATTEMPT}"]),
        ("attempts", [f"DELETE FROM verdicts WHERE attempt_id = {AN_OPEN_ATTEMPT}"]),
        ("attempts", [f"UPDATE attempts SET oldest_version = 99 WHERE attempt_id = {AN_OPEN_ATTEMPT}"]),
        ("record", ["UPDATE runs SET last_ready = 99"]),
        ("record", ["UPDATE events SET sequence = sequence + 100000"]),
    ],
)
def test_damage_is_found_and_named(finished: Engine, check: str, statements: list[str]) -> None:
    damage(finished, *statements)
    report = audit(finished, RUN, max_staleness=2)
    assert check in {finding.check for finding in report.findings}
    assert all(finding.rows for finding in report.findings)


def test_an_unknown_run_is_named_with_those_that_there_are(finished: Engine) -> None:
    with pytest.raises(UnknownRun, match=f"'r-other': not in this ledger; it has: {RUN}"):
        audit(finished, "r-other", max_staleness=2)


def test_the_command_prints_the_promises_and_exits_by_them(tmp_path: Path) -> None:
    run_config = config(max_steps=2)
    objects = stores.connect(f"file:{tmp_path / 'objects'}")
    ref = objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(run_config))
    with opened("sqlite", tmp_path) as engine:
        world = World(engine, run_config)
        world.start()
        world.run_until("finished")
        damage(engine, f"UPDATE runs SET config = '{msgspec.json.encode(ref).decode()}'")
        sound = CliRunner().invoke(app, ["audit", RUN, "--state", str(tmp_path)])
        assert sound.exit_code == 0, sound.output
        assert "0 lost, 0 trained twice, 0 staleness violations" in sound.output
        assert "at most 2 allowed" in sound.output
        shown = CliRunner().invoke(app, ["show", "--state", str(tmp_path)])
        assert shown.exit_code == 0, shown.output
        assert "2 of 2 steps are done" in shown.output
        damage(engine, f"UPDATE groups SET announced = NULL WHERE group_id = {A_TRAINED_GROUP}", "DELETE FROM trained")
        broken = CliRunner().invoke(app, ["audit", "--json", "--state", str(tmp_path)])
        assert broken.exit_code == 1
        assert json.loads(broken.output)["lost"] == 1


@pytest.mark.parametrize("command", ["audit", "show", "sweep", "sweep --delete"])
def test_a_run_that_the_ledger_has_not_is_refused_with_those_that_it_has(command: str, tmp_path: Path) -> None:
    with opened("sqlite", tmp_path) as engine:
        words = [*command.split(), "--state", str(tmp_path)]
        empty = CliRunner().invoke(app, words)
        assert (empty.exit_code, empty.stderr) == (2, "the ledger holds no run yet\n")
        world = World(engine, config(max_steps=2))
        world.start()
        world.run_until("finished")
        other = CliRunner().invoke(app, [*words, "r-other"])
        assert (other.exit_code, other.stderr) == (2, f"run 'r-other': not in this ledger; it has: {RUN}\n")


def test_what_others_have_written_steers_neither_the_terminal_nor_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with opened("sqlite", tmp_path) as engine:
        world = World(engine, config(max_steps=2))
        world.start()
        world.run_until("finished")
        damage(
            engine,
            "UPDATE runs SET reason = char(27) || '[2Jwas [/gone]'",
            "UPDATE events SET data = '{\"a\": [null]}'",
        )
        shown = CliRunner().invoke(app, ["show", "--state", str(tmp_path)])
        assert shown.exit_code == 0, shown.exception
        assert "⟨ESC⟩[2Jwas [/gone]" in shown.output
        assert '{"a": [null]}' in shown.output
        with engine.begin() as connection:
            attempt = connection.exec_driver_sql("SELECT min(attempt_id) FROM attempts").scalar()
        damage(engine, 'UPDATE events SET data = \'{"a": "\\u001b[2Jwas [/gone]"}\'')
        life = CliRunner().invoke(app, ["trace", str(attempt), "--state", str(tmp_path)])
        assert life.exit_code == 0, life.exception
        assert "a ⟨ESC⟩[2Jwas [/gone]" in life.output


def test_what_was_given_up_is_told_by_reason_and_counts_as_no_loss(tmp_path: Path) -> None:
    with opened("sqlite", tmp_path) as engine:
        world = World(engine, config(minutes=1.0), slow={i: 1000 for i in range(40, 60)}, capacity=200)
        world.start()
        world.run_until("finished", ticks=200)
        report = audit(engine, RUN, max_staleness=2)
        why = "the run stopped before the group was complete"
        assert report.reasons["attempts dropped"] == {why: report.attempts["dropped"]}
        assert report.reasons["groups dropped"] == {why: report.groups["dropped"]}
        shown = CliRunner().invoke(app, ["audit", "--state", str(tmp_path)])
        assert shown.exit_code == 0, shown.output
        assert f"because: {why}" in shown.output
        assert "accounted for, not lost" in shown.output
        told = json.loads(CliRunner().invoke(app, ["audit", "--json", "--state", str(tmp_path)]).output)
        assert told["reasons"] == report.reasons


def test_the_command_says_where_it_looked_when_there_is_no_ledger(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", "--state", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path / 'ledger.db'}: no ledger here" in result.output
