"""A problem of several steps: one attempt is told one instruction after another, and earns a reward for each step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from services.curator import own
from services.reward.score import score
from services.rollout.byhand import kept
from services.rollout.cli import app
from services.trainer import credit
from shared.contracts.messages import Verdict, earned_by_step
from shared.contracts.run import Credit, RewardConfig, Sampling
from shared.contracts.trajectory import Change, pack, unpack
from shared.environments import Call, Grading, Workspace
from shared.environments.repository import RepositoryEnvironment, cheats
from shared.environments.repository.trees import File
from shared.environments.steps import StepsEnvironment
from shared.environments.steps.problem import StepsHidden, StepsProblem, StepTests, Then
from shared.objects.directory import DirectoryObjects
from shared.problems import ProblemError
from shared.problems.importing import import_jsonl
from tests.contract.sandboxes import NO_BWRAP
from tests.datasets import harbor
from tests.laboratory import CALC, FILES, SOLUTION, UNITS, Laboratory

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)

ADDS = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
SCALES = "from calc import scaled\n\n\ndef test_scaled():\n    assert scaled(2, 'km') == 2000\n"
MEND_ADD = ("edit", {"path": "calc.py", "old": "a - b", "new": "a + b"})
MEND_KM = ("edit", {"path": "units.py", "old": '"km": 100,', "new": '"km": 1000,'})
SUBMIT = ("submit", {})
LINE: dict[str, Any] = {
    "kind": "steps",
    "id": "two",
    "tree": "calc/",
    "prompt": "`add` subtracts. Repair it.",
    "then": [{"prompt": "Now a kilometre: see note.txt.", "files": {"note.txt": "It has 1000 metres.\n"}}],
    "hidden": {
        "steps": [
            {
                "fail_to_pass": ["tests/test_add.py::test_add"],
                "tests": {"tests/test_add.py": ADDS},
                "solution": {"calc.py": CALC.replace("a - b", "a + b")},
            },
            {
                "fail_to_pass": ["tests/test_km.py::test_scaled"],
                "tests": {"tests/test_km.py": SCALES},
                "solution": {
                    "calc.py": CALC.replace("a - b", "a + b"),
                    "units.py": UNITS.replace('"km": 100,', '"km": 1000,'),
                    "note.txt": "It has 1000 metres.\n",
                },
            },
        ]
    },
}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / "calc" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "calc" / path).write_text(text)
    (tmp_path / "problems.jsonl").write_text(json.dumps(LINE) + "\n")
    return tmp_path / "problems.jsonl"


def test_an_attempt_earns_for_each_step_what_it_had_done_when_it_submitted_that_step(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It submits the first step with nothing done, and does both in the second: the first earns nothing, nor do its turns."""
    monkeypatch.chdir(tmp_path)
    replies = [
        {"text": "Nothing to do.", "calls": [{"name": "submit"}, {"name": "list"}]},
        *({"calls": [{"name": name, "arguments": given}]} for name, given in (MEND_ADD, MEND_KM, SUBMIT)),
    ]
    (tmp_path / "replies.json").write_text(json.dumps(replies))
    words = [
        "run",
        str(lines),
        "--scripted",
        str(tmp_path / "replies.json"),
        "--json",
        "--state",
        str(tmp_path / "state"),
    ]
    run = CliRunner().invoke(app, words, env={"ETUDE_SANDBOX": "bubblewrap", "COLUMNS": "120"})
    assert run.exit_code == 0, run.stderr
    record = json.loads(run.stdout)
    attempt = kept.load(tmp_path / "state" / "attempts", record["id"])
    text = attempt.renderer.text(attempt.trajectory.segments[0].tokens.tolist())
    assert "Step 1 of 2:\n\n`add` subtracts." in text
    assert "Step 2 of 2:\n\nNow a kilometre" in text
    assert "not run: the work was submitted before it" in text  # `list`, in the turn that submitted

    verdict = record["verdict"]
    assert (verdict["solved"], verdict["passed"], verdict["total"], verdict["steps"]) == (False, 1, 2, [0.0, 0.5])
    assert verdict["notes"][:2] == ["step 1: 0 of 1 tests passed", "step 2: 1 of 1 tests passed"]

    trajectory = unpack(pack(attempt.trajectory))
    assert [sorted(changes) for changes in trajectory.submission.steps] == [[], ["calc.py", "note.txt", "units.py"]]
    earned = Verdict(solved=False, passed=1, total=2, steps=[0.0, 0.5])
    ((problem, _),) = import_jsonl(lines)
    assert problem.task == "`add` subtracts. Repair it.\n\nNow a kilometre: see note.txt."
    reward, terms = score(RewardConfig(solved=2.0, length=None, behaviour={}), earned, trajectory.effort, {})
    assert (reward, earned_by_step(earned, terms)) == (1.0, [0.0, 1.0])
    assert credit.submitting(trajectory) == [1, 4]


def test_turns_earn_what_their_step_and_the_later_ones_earned() -> None:
    from tests.unit.trainer.test_credit import EDIT, SUBMIT, attempt

    plain = Credit(per="turn", discount=1.0, faults={})
    both = attempt(EDIT, SUBMIT, EDIT, SUBMIT)
    assert credit.turn_returns(both, 1.0, plain, None, [0.75, 0.25]) == {1: 1.0, 2: 1.0, 3: 0.25, 4: 0.25}
    assert credit.turn_returns(both, 1.0, plain) == dict.fromkeys((1, 2, 3, 4), 1.0)  # a problem without steps
    # A step is compared with the same step of others alone: a first step that all solve teaches nothing.
    shares = credit.assign([both, both], [1.0, 0.75], plain, lot=0.0, steps=[[0.75, 0.25], [0.75, 0.0]])
    sampled = [[float(row[at]) for at in range(len(row)) if both.segments[0].loss_mask[at]][::2] for (row,) in shares]
    assert sampled == [[0.125, 0.125, 0.125, 0.125], [-0.125, -0.125, -0.125, -0.125]]
    shares = credit.assign([both, both], [0.75, 0.75], plain, lot=0.0, steps=[[0.75, 0.0], [0.75, 0.0]])
    assert not any(row.any() for (row,) in shares)


def laboratory(tmp_path: Path) -> tuple[StepsEnvironment, StepsProblem]:
    lab = Laboratory(tmp_path)
    plain = lab.problem()
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__ if name != "kind"}
    then = [
        Then(prompt="Now the kilometre.", files={"note.txt": Change(text="1000\n")}, setup=["cp note.txt copy.txt"])
    ]
    return StepsEnvironment(lab.places), StepsProblem(**fields, then=then)


def hidden(*, gate: bool = False, reward: Any = "mean") -> StepsHidden:
    """`copy.txt` and `note.txt` are left out of the solution of step 2: its tests do not need them."""
    add, km = SOLUTION["calc.py"], SOLUTION["units.py"]
    steps = [
        StepTests(
            fail_to_pass=["tests/test_add.py::test_add"],
            tests={"tests/test_add.py": Change(text=ADDS)},
            solution={"calc.py": add},
            gate=gate,
        ),
        StepTests(
            fail_to_pass=["tests/test_km.py::test_scaled"],
            tests={"tests/test_km.py": Change(text=SCALES)},
            solution={"calc.py": add, "units.py": km},
        ),
    ]
    return StepsHidden(id="calc", steps=steps, reward=reward)


async def answered(workspace: Workspace, name: str, given: dict[str, Any]) -> str:
    (result,) = await workspace.call([Call("0", name, given, 0, 0)])
    return result.text


def test_a_workspace_goes_on_in_the_step_in_which_it_was_saved(tmp_path: Path) -> None:
    environment, problem = laboratory(tmp_path)

    async def scenario() -> None:
        first = await environment.open(problem, Sampling())
        opening = first.brief()
        assert opening.messages[1].content.startswith("Step 1 of 2:\n\nAdding numbers")
        await answered(first, *MEND_ADD)
        result = await first.final("I am done.")  # a message without a call submits the step, too
        assert result is not None
        assert result.text == "Step 2 of 2:\n\nNow the kilometre."
        assert await answered(first, "shell", {"command": "cat copy.txt"}) == "1000"
        saved = await first.save()
        await first.close()
        assert saved is not None
        second = await environment.open(problem, Sampling())
        assert await second.restore(saved) == opening  # what the open segment began with
        task = second.brief(continues=True).messages[1].content  # of a segment after a self-summary
        assert "(This step is submitted.)\n\nStep 2 of 2:\n\nNow the kilometre." in task
        await answered(second, *MEND_KM)
        assert await answered(second, *SUBMIT) == "submitted"
        assert await second.final("") is None
        work = await second.submission()
        await second.close()
        assert work.steps[0] == {"calc.py": SOLUTION["calc.py"]}
        assert {path: work.steps[1][path] for path in SOLUTION} == SOLUTION
        (verdict,) = await environment.grade([Grading(problem, hidden(), work)])
        assert isinstance(verdict, Verdict)
        assert (verdict.solved, verdict.steps) == (True, [0.5, 0.5])

    asyncio.run(scenario())


def test_a_gate_shuts_what_follows_and_the_last_step_may_earn_all() -> None:
    from shared.environments.steps import together

    failed, passed = Verdict(solved=False, passed=0, total=1), Verdict(solved=True, passed=1, total=1)
    for tests, answers, solved, earned in (
        (hidden(), [failed, passed], False, [0.0, 0.5]),
        (hidden(gate=True), [failed, passed], False, [0.0, 0.0]),
        (hidden(reward="final"), [failed, passed], True, [0.0, 1.0]),
        (hidden(reward="final", gate=True), [failed, passed], False, [0.0, 0.0]),
        (hidden(), [passed], False, [0.5, 0.0]),
    ):
        verdict = together(tests, answers)
        assert isinstance(verdict, Verdict)
        assert (verdict.solved, verdict.steps, verdict.total) == (solved, earned, 2)
    missed = together(hidden(), [passed])
    assert isinstance(missed, Verdict)
    assert missed.notes == ["step 1: 1 of 1 tests passed", "step 2: not reached"]


def test_admission_grades_every_steps_solution_and_its_cheats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, problem = laboratory(tmp_path)
    assert environment.given(problem, ["note.txt", "calc.py", "x"]) == {"note.txt": "1000\n", "calc.py": CALC}
    work = environment.cheats(problem, hidden())["source exits in step 2"]
    assert (work.steps[0], work.steps[-1]) == (hidden().steps[0].solution, work.changes)
    begun = work.changes["calc.py"].text or ""
    assert begun.startswith(SOLUTION["calc.py"].text or "-")  # the trick is put behind what step 1 left
    assert work.changes["note.txt"] == problem.then[0].files["note.txt"]

    usual = cheats.cheats
    monkeypatch.setattr(cheats, "cheats", lambda *given: {"source exits": usual(*given)["source exits"]})
    (outcome,) = asyncio.run(environment.admit([(problem, hidden())]))
    assert (outcome.reason, outcome.proven) == ("", True)
    short = StepsHidden(id="calc", steps=hidden().steps[:1])
    (outcome,) = asyncio.run(environment.admit([(problem, short)]))
    assert outcome.reason == "field 'hidden.steps': found 1; allowed: one for each of the 2 steps"


def test_a_step_that_the_one_before_has_solved_is_refused(tmp_path: Path) -> None:
    """Its share would be paid for nothing, although the whole problem is not solved by doing nothing."""
    environment, problem = laboratory(tmp_path)
    both = hidden()
    second = msgspec.structs.replace(both.steps[0], solution=both.steps[1].solution)
    (outcome,) = asyncio.run(environment.admit([(problem, StepsHidden(id="calc", steps=[both.steps[0], second]))]))
    assert outcome.reason.startswith("step 2: no-op: the tree as given passes every test: 1 of 1 tests passed")
    assert outcome.refused_by == "no-op"


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (hidden(), "step 1: cheat 'conftest passes all'"),
        (hidden(gate=True), "step 1: cheat 'conftest passes all'"),
        (
            hidden(reward="final", gate=True),
            "step 1: cheat 'conftest passes all'",
        ),  # earns nothing, and opens what does
        (hidden(reward="final"), ""),  # neither
    ],
)
def test_a_cheat_of_one_step_is_refused_where_the_step_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: StepsHidden, reason: str
) -> None:
    environment, problem = laboratory(tmp_path)

    async def fooled(self: object, items: list[Grading]) -> list[Verdict]:
        """A grader that a conftest.py convinces, in the tests of step 1."""
        solved = [
            item.submission.changes == item.hidden.solution
            or (
                "conftest.py" in item.submission.changes and item.hidden.fail_to_pass == ["tests/test_add.py::test_add"]
            )
            for item in items
        ]
        return [Verdict(solved=one, passed=int(one), total=1) for one in solved]

    monkeypatch.setattr(RepositoryEnvironment, "grade", fooled)
    (outcome,) = asyncio.run(environment.admit([(problem, work)]))
    assert outcome.reason.startswith(reason)
    assert bool(outcome.reason) == bool(reason)


def test_a_field_that_nobody_knows_is_refused_in_a_step_too(tmp_path: Path, lines: Path) -> None:
    lines.write_text(json.dumps({**LINE, "then": [{"prompt": "x", "promt": "y"}]}) + "\n")
    with pytest.raises(ProblemError, match=r"field 'then\[0\]\.promt': not known; did you mean 'then\[0\]\.prompt'\?"):
        import_jsonl(lines, DirectoryObjects(tmp_path / "objects"))


def test_a_harbor_task_of_several_steps_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    harbor.build(
        tmp_path / "tasks",
        {"inflection/__init__.py": File(b"def teen(number):\n    return number % 100 in (11, 12, 13)\n")},
    )
    task = tmp_path / "tasks" / "two-steps"
    facts = (task / "task.toml").read_text()
    facts = facts.replace('name = "first"\n', 'name = "first"\nmin_reward = 1.0\nagent = {timeout_sec = 60.0}\n')
    (task / "task.toml").write_text(
        facts.replace('name = "second"\n', 'name = "second"\nagent = {timeout_sec = 90.0}\n')
    )
    (task / "steps/second/workdir").mkdir()
    (task / "steps/second/workdir/setup.sh").write_text("touch /app/begun\n")
    (task / "steps/second/workdir/hint.txt").write_text("Titleize.\n")

    (row,) = own.from_source("harbor-steps", task, None).rows
    problem, secret = row.problem, row.hidden
    assert (row.row, row.note, problem.kind, problem.limits.seconds) == ("two-steps", "", "steps", 150.0)
    assert problem.prompt.startswith("Write the plural of `octopus`")
    (then,) = problem.then
    assert then.prompt == "Write the text of /workspace/first.txt, titleized, to /workspace/second.txt.\n"
    assert (then.files, then.setup) == ({"hint.txt": Change(text="Titleize.\n")}, ["touch /workspace/begun\n"])
    assert [(sorted(step.solution), step.gate) for step in secret.steps] == [
        (["first.txt"], True),
        (["begun", "first.txt", "hint.txt", "second.txt"], False),
    ]
    assert secret.reward == "mean"
    with pytest.raises(
        ProblemError, match="--agent: found the row 'two-steps' of several steps; allowed: one instruction"
    ):
        own.from_source("harbor-steps", task, None, agent="my-agent")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"then": []}, "field 'then': found 0 steps after the first; allowed: 1 to 49"),
        ({"then": [{"prompt": " "}]}, "field 'then[0].prompt': found nothing; allowed: an instruction"),
        ({"then": [{"prompt": "x", "files": {"../x": "y"}}]}, "field 'then[0].files[../x]'"),
        (
            {"hidden": {"steps": [{"fail_to_pass": []}]}},
            "field 'hidden.steps': found 1; allowed: one for each of the 2 steps",
        ),
        (
            {"hidden": {"steps": [{"fail_to_pass": []}, {"fail_to_pass": []}]}},
            "field 'hidden.steps[0].fail_to_pass': is empty; allowed: the tests that fail before",
        ),
    ],
)
def test_a_line_that_cannot_be_is_refused_with_its_field(
    tmp_path: Path, lines: Path, change: dict[str, Any], words: str
) -> None:
    lines.write_text(json.dumps({**LINE, **change}) + "\n")
    objects = DirectoryObjects(tmp_path / "objects")
    ((problem, secret),) = import_jsonl(lines, objects)
    lab = Laboratory(tmp_path)
    lab.places.objects = objects
    (outcome,) = asyncio.run(StepsEnvironment(lab.places).admit([(problem, secret)]))
    assert words in outcome.reason
