"""Recorded submissions graded again: what changes is said, and nothing is overwritten or counted as 0 that was not graded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.reward import regrade_cli
from services.reward.packs import Packs
from services.reward.regrade import Against, BadFile, GradingFile, Line, code_state, compared
from services.reward.regrading import TRIES, Recorded, Regrader
from shared import objects as stores
from shared.contracts.messages import Verdict
from shared.contracts.run import RewardConfig
from shared.environments import InfrastructureError, Places
from shared.environments.registry import Environments
from shared.problems import values
from shared.problems.pack import write
from tests.guard.problems import fixed
from tests.unit.reward.recorded import RIGHT, WRONG, every_byte, record


@pytest.fixture(autouse=True)
def _bare_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_SANDBOX", "process")


def run(state: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(regrade_cli.alone, ["r-1", "--state", str(state), "--json", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout) if done.exit_code < 2 else {"said": done.output}


def stricter(folder: Path) -> Path:
    """Hidden tests of which one expects something that the solution does not give."""
    hidden = fixed()[0][1]
    odd = msgspec.structs.replace(hidden.cases[0], expected=values.encode("no such answer"))
    path = folder / "train.hidden.jsonl.zst"
    path.write_bytes(write([msgspec.structs.replace(hidden, cases=[odd, *hidden.cases[1:]])]))
    return path


def test_the_same_tests_give_the_same_verdicts_and_nothing_recorded_changes(state: Path) -> None:
    before = every_byte(state)
    code, found = run(state)
    assert (code, found["total"]["graded"], found["total"]["solved"]) == (0, 4, [3, 3])
    assert found["total"]["newly_solved"] == found["total"]["newly_failed"] == 0
    assert found["mean"][0] == found["mean"][1]
    after = every_byte(state)
    assert {path: data for path, data in after.items() if path in before} == before
    [name] = [Path(path).name for path in after.keys() - before.keys()]
    assert name.startswith("r-1-")
    assert name.endswith(".jsonl")


def test_other_hidden_tests_change_verdicts_problem_by_problem_and_in_sum(state: Path) -> None:
    problem = fixed()[0][0].id
    code, found = run(state, "--hidden", str(stricter(state)))
    assert code == 0
    assert found["problems"][problem]["solved"] == found["total"]["solved"] == [3, 0]
    assert found["total"]["newly_failed"] == 3
    assert found["mean"][1] == 0.0 < found["mean"][0]
    assert found["signal"] == [1, 0]
    assert found["examples"] == ["a0", "a1", "a2"]
    done = CliRunner().invoke(
        regrade_cli.alone, ["r-1", "--state", str(state), "--hidden", str(state / "train.hidden.jsonl.zst")]
    )
    said = " ".join(done.output.split())
    assert "4 of 4 submissions graded again" in said
    assert "4 of them were there before; --out NEW grades from the beginning" in said


def test_an_interrupted_command_goes_on_where_it_stopped_and_a_cut_line_is_graded_again(state: Path) -> None:
    out = state / "again.jsonl"
    run(state, "--out", str(out))
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    code, found = run(state, "--out", str(out))
    assert (code, found["known_before"], found["total"]["graded"]) == (0, 2, 4)
    assert sorted(out.read_bytes().splitlines()) == sorted(line.rstrip() for line in lines)


def test_a_submission_that_is_lost_is_named_and_no_zero_and_tried_again_by_the_next_call(state: Path) -> None:
    objects = stores.connect(f"file:{state / 'objects'}")
    data = objects.get(objects.head("t0"))
    objects.delete("t0")
    code, found = run(state)
    assert (code, found["total"]["graded"], found["total"]["not_graded"]) == (1, 3, 1)
    assert "ObjectMissing" in found["reasons"]["a0"]
    assert found["total"]["solved"] == [2, 2]
    objects.put("t0", data)
    code, found = run(state)
    assert (code, found["known_before"], found["total"]["graded"]) == (0, 3, 4)


def test_files_of_other_tests_or_of_something_else_are_refused_and_left_alone(state: Path) -> None:
    out = state / "again.jsonl"
    run(state, "--out", str(out))
    data = out.read_bytes()
    code, found = run(state, "--out", str(out), "--hidden", str(stricter(state)))
    assert code == 2
    assert "found gradings of r-1 against its own tests; allowed: r-1 against hidden" in found["said"]
    for text in (b"notes of mine", b"notes of mine\nand more\n", b'{"attempt": "a"}\n'):
        (state / "notes").write_bytes(text)
        code, found = run(state, "--out", str(state / "notes"))
        assert (code, (state / "notes").read_bytes()) == (2, text)
        assert "it is no file of gradings" in found["said"]
    code, found = run(state, "--hidden", str(state / "notes"))
    assert (code, "found no pack" in found["said"]) == (2, True)
    assert out.read_bytes() == data


def test_after_a_change_of_what_grades_nothing_is_repeated_from_a_complete_file(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = state / "again.jsonl"
    run(state, "--out", str(out))
    assert run(state)[1]["known_before"] == 0
    assert run(state)[1]["known_before"] == 4
    monkeypatch.setenv("ETUDE_SANDBOX_IMAGE", "base:other")
    assert run(state)[1]["known_before"] == 0
    code, found = run(state, "--out", str(out))
    assert (code, "by another state of the code" in found["said"], "--out NEW" in found["said"]) == (2, True, True)

    (tmp_path / "code").mkdir()
    states = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", ""), ("notes.txt", "")):
        (tmp_path / "code" / name).write_text(text)
        states.append(code_state([tmp_path / "code"]))
    assert len(set(states)) == 3
    assert states[2] == states[3] != code_state([tmp_path / "code"], "fact")


def test_two_commands_do_not_write_one_file(tmp_path: Path) -> None:
    with GradingFile(tmp_path / "f", Against(run="r")), pytest.raises(BadFile, match="another process writes it"):
        GradingFile(tmp_path / "f", Against(run="r"))


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12))
def test_sums_count_each_graded_attempt_once_and_no_other(drawn: list[tuple[bool, bool, bool]]) -> None:
    records = [record(f"a{i}", f"g{i // 3}", solved=was) for i, (was, _, _) in enumerate(drawn)]
    after = {f"a{i}": RIGHT if now else WRONG for i, (_, now, there) in enumerate(drawn) if there}
    lost = {f"a{i}": "gone" for i, (_, _, there) in enumerate(drawn) if not there}
    total = compared(records, after, lost, RewardConfig()).total
    graded = [(was, now) for was, now, there in drawn if there]
    assert (total.graded, total.not_graded) == (len(graded), len(lost))
    assert total.solved == (sum(was for was, _ in graded), sum(now for _, now in graded))
    assert total.solved[1] - total.solved[0] == total.newly_solved - total.newly_failed


class Failing:
    """The sandboxes of functions, away for the first `times` runs."""

    def __init__(self, times: int) -> None:
        self.times, self.runs = times, 0

    async def run(self, runs: Any) -> Any:
        self.runs += 1
        if self.runs <= self.times:
            raise InfrastructureError("the machine is busy")
        from shared import sandbox

        pool = sandbox.connect("process", 1)
        try:
            return await pool.run(runs)
        finally:
            pool.close_sync()


class Hesitant(Environments):
    """Every grading fails `times` times; canaries always work."""

    def __init__(self, times: int) -> None:
        super().__init__(Places(functions=Failing(times)))  # type: ignore[arg-type]

    async def check(self, kind: str = "") -> None:
        return None


@pytest.mark.parametrize(("times", "is_graded"), [(TRIES - 1, True), (TRIES, False)])
def test_a_failure_of_infrastructure_is_tried_again_and_never_a_verdict(
    state: Path, times: int, is_graded: bool
) -> None:
    objects = stores.connect(f"file:{state / 'objects'}")
    problem = fixed()[0][0].id
    refs = {problem: (objects.head("pack"), objects.head("hidden"))}
    waits: list[float] = []
    regrader = Regrader(objects, Hesitant(times), Packs(objects), refs, wait=waits.append)

    submission = Recorded(replace(record("a0", "g0", solved=True), problem=problem), objects.head("t0"))
    [[(_, answer)]] = list(regrader.graded([submission]))
    assert waits == [1.0, 2.0, 4.0]
    if is_graded:
        assert isinstance(answer, Verdict)
        assert answer.solved
    else:
        assert answer == "InfrastructureError: the machine is busy"


def test_lines_keep_verdicts_as_they_are(tmp_path: Path) -> None:
    line = Line(attempt="a", trajectory="c", problem="p", before=RIGHT, after=Verdict(solved=False, passed=1, total=2))
    with GradingFile(tmp_path / "f", Against(run="r")) as file:
        file.add([line])
    with GradingFile(tmp_path / "f", Against(run="r")) as file:
        assert file.lines == {("a", "c"): line}
