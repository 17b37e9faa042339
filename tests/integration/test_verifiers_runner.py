"""Kind `verifiers` with a stand-in for the package: tokens and reward are recorded exactly, and a policy forges no reward."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.curator import own
from services.reward.terms import environment_reward
from services.rollout.endpoint.foreign import ForeignAgent
from shared.contracts.messages import StopReason, Verdict
from shared.environments import InfrastructureError, SandboxGone
from shared.environments.verifiers import VerifiersEnvironment, VerifiersWorkspace
from shared.environments.verifiers.problem import VerifiersHidden, VerifiersLimits, VerifiersProblem
from shared.problems import ProblemError
from shared.terms import Seen
from tests.contract.sandboxes import NO_BWRAP
from tests.integration.verifiers_world import Found, attempted, environment_of, problem_of, stand_in
from tests.patience import eventually
from tests.training import require_a_step, stored
from tests.unit.endpoint.world import Policy, renderer, require_exact

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)]

LIMITS = VerifiersLimits(seconds=300.0, scoring_s=60.0, memory_mb=1000)
# A policy's program: it looks for the nonce, the key and a way out in the process that started it.
FORGER = """
import os, re
parent, found = os.getppid(), []
for name in ("environ", "mem", "maps"):
    try:
        text = open(f"/proc/{parent}/{name}", "rb").read(1 << 16)
        found.append(name if text else "")
    except OSError:
        pass
try:
    found += [f"fd {name}" for name in os.listdir(f"/proc/{parent}/fd")]
except OSError:
    pass
for number in range(3, 64):
    try:
        os.write(number, b'{"nonce": "", "said": {"event": "scored", "reward": "1.0", "metrics": {}}}\\n')
        found.append(f"written {number}")
    except OSError:
        pass
print("found:", [name for name in found if name], "key" if "OPENAI_API_KEY" in os.environ else "no key")
print('{"nonce": "", "said": {"event": "scored", "reward": "1.0", "metrics": {}}}')
"""
KILLER = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"


@pytest.fixture(scope="module")
def agents() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="etude-test-agents-"))  # which the sandbox's user can read, unlike pytest's
    folder.chmod(0o755)
    (folder / "empty").mkdir()
    yield stand_in(folder)
    shutil.rmtree(folder)


@pytest.fixture
def environment(tmp_path: Path, agents: Path) -> VerifiersEnvironment:
    return environment_of(tmp_path, agents)


def asking(environment: VerifiersEnvironment, **arguments: Any) -> VerifiersProblem:
    return problem_of(environment, 2, environment="asking", arguments=arguments, limits=LIMITS)


def reward_of(found: Found) -> Any:
    return json.loads(found[1].notes["environment_reward"])


def test_a_rollout_is_recorded_exactly_and_its_reward_is_trained(
    tmp_path: Path, environment: VerifiersEnvironment
) -> None:
    problem = asking(environment, turns=2)
    half = attempted(tmp_path / "half", environment, problem, ["It is 3.", "It is 4."], solved_at=0.75)
    none = attempted(tmp_path / "none", environment, problem, ["No idea."], solved_at=0.5)
    for agent, work, policy, _ in (half, none):
        assert work.stop is StopReason.submitted, work.notes
        require_exact(agent.recording, policy)
        assert dict(agent.recording.branches) == {"first": 1, "continues": 1}
        assert work.notes["environment"].startswith("the environment is loaded")
    assert [found[3] for found in (half, none)] == [Verdict(solved=False, passed=0, total=1)] * 2
    made = [stored(i, found[0].recorder, found[0].effort) for i, found in enumerate((half, none))]
    for trajectory, found in zip(made, (half, none), strict=True):
        trajectory.notes = found[1].notes
    terms = [environment_reward.find(Seen(one, {})) for one in made]
    assert [term.amount for term in terms] == [0.5, 0.0]
    assert [piece.text for piece in terms[0].evidence] == ["share 0.5", "turns 2"]
    sampled = sum(len(tokens) for found in (half, none) for _, tokens in found[2].seen)
    require_a_step(made, [0.5, 0.0], half[2].renderer.vocab_size, sampled)


def test_a_program_of_the_policy_finds_neither_nonce_nor_key_nor_the_way_out(
    tmp_path: Path, environment: VerifiersEnvironment
) -> None:
    found = attempted(tmp_path, environment, asking(environment, script=FORGER), ["I forge."])
    assert "found: [] no key" in found[1].notes["environment"]
    assert reward_of(found) == {"reward": 0.0, "metrics": {"share": 0.0, "turns": 1.0}, "turns": 1, "error": ""}


def test_a_policy_that_kills_the_environment_gets_no_reward(tmp_path: Path, environment: VerifiersEnvironment) -> None:
    found = attempted(tmp_path, environment, asking(environment, script=KILLER), ["3"])
    assert found[1].stop is StopReason.submitted
    assert found[3] == Verdict(solved=False, passed=0, total=1, error="no reward: the environment ended without one")
    assert reward_of(found)["reward"] is None


def test_what_was_sampled_up_to_a_limit_is_scored(tmp_path: Path, environment: VerifiersEnvironment) -> None:
    agent, work, policy, verdict = attempted(
        tmp_path, environment, asking(environment, turns=1000), ["3"], solved_at=0.5
    )
    assert work.stop is StopReason.turn_limit
    assert agent.effort.turns == 20
    require_exact(agent.recording, policy)
    assert verdict.solved
    assert reward_of((agent, work, policy, verdict))["error"] == "ModelError"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("rubric", "no reward: ZeroDivisionError"),
        ("nan", "reward: found nan; allowed: a finite number"),
    ],
)
def test_a_rubric_that_fails_gives_no_reward_and_its_words_stay_out_of_the_verdict(
    tmp_path: Path, environment: VerifiersEnvironment, wrong: str, error: str
) -> None:
    found = attempted(tmp_path, environment, asking(environment, wrong=wrong), ["3"])
    assert found[3] == Verdict(solved=False, passed=0, total=1, error=error)
    assert wrong != "rubric" or "secret" in found[1].notes["environment"]


def test_a_request_that_the_endpoint_refuses_is_told_and_is_no_verdict(
    tmp_path: Path, environment: VerifiersEnvironment
) -> None:
    problem = asking(environment, sampling={"top_p": 0.9, "temperature": 0.2})
    with pytest.raises(InfrastructureError, match="top_p"):
        attempted(tmp_path, environment, problem, ["3"])


def test_problems_that_cannot_be_attempted_are_refused_by_name(environment: VerifiersEnvironment) -> None:
    good = asking(environment)
    source = good.source
    cases = {
        "": good,
        "field 'digest': found 'other'; allowed": msgspec.structs.replace(good, digest="other"),
        "field 'index': found 7; allowed: 0 to 4 of split 'train'": msgspec.structs.replace(good, index=7),
        "RuntimeError: no data set here": msgspec.structs.replace(
            good, source=msgspec.structs.replace(source, arguments={"wrong": "load"})
        ),
        "its rubric scores groups": msgspec.structs.replace(
            good, source=msgspec.structs.replace(source, arguments={"wrong": "group"})
        ),
        "environment 'absent' cannot be loaded: ModuleNotFoundError": msgspec.structs.replace(
            good, source=msgspec.structs.replace(source, environment="absent")
        ),
        "field 'source.folder': found 'elsewhere'; allowed: a virtual environment below": msgspec.structs.replace(
            good, source=msgspec.structs.replace(source, folder="elsewhere")
        ),
        "bin/python": msgspec.structs.replace(good, source=msgspec.structs.replace(source, folder="empty")),
        "field 'image'": msgspec.structs.replace(good, source=msgspec.structs.replace(source, image="docker:x")),
    }
    pairs = [
        (msgspec.structs.replace(problem, id=f"p{i}"), VerifiersHidden(id=f"p{i}"))
        for i, problem in enumerate(cases.values())
    ]
    outcomes = asyncio.run(environment.admit(pairs))
    for expected, outcome in zip(cases, outcomes, strict=True):
        assert expected in outcome.reason
        assert bool(expected) == bool(outcome.reason), outcome.reason


def test_a_file_that_names_an_environment_becomes_admitted_problems(
    tmp_path: Path, agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETUDE_SANDBOX_AGENTS", str(agents))
    file = tmp_path / "asking.toml"
    file.write_text('environment = "asking"\nfirst = 3\nsolved_at = 0.5\n[arguments]\nturns = 2\n')
    found = own.from_source("verifiers", file, None)
    assert [row.problem.prompt for row in found.rows] == ["What is 3 + 1?", "What is 4 + 1?"]
    fitting = own.checked(file, found.lines, lambda: renderer(tmp_path / "chat"), False, "bubblewrap", len)
    assert [(problem.id, hidden.solved_at) for problem, hidden in fitting.pairs] == [
        ("asking-train-3", 0.5),
        ("asking-train-4", 0.5),
    ]


@pytest.mark.parametrize(
    ("text", "agent", "said"),
    [
        (
            "environment = 7",
            "",
            r"Expected `str`, got `int` - at `\$.environment`; allowed: a TOML file with the fields",
        ),
        ("environment = 'asking'\nenviron = 'asking'", "", "unknown field `environ`"),
        ("environment = 'asking'\nmost = 0", "", "Expected `int` >= 1"),
        ("environment = 'asking'\nfirst = 9", "", "field 'first': found 9; allowed: 0 to 4 of split 'train'"),
        ("environment = 'absent'", "", "environment 'absent' cannot be loaded: ModuleNotFoundError"),
        ("environment = 'asking'\nfolder = '../up'", "", "folder"),
        ("environment = 'asking'", "my-agent", "--agent: found a source of kind 'verifiers'"),
    ],
)
def test_a_file_that_names_no_usable_environment_is_refused(
    tmp_path: Path, agents: Path, monkeypatch: pytest.MonkeyPatch, text: str, agent: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETUDE_SANDBOX_AGENTS", str(agents))
    file = tmp_path / "asking.toml"
    file.write_text(text)
    with pytest.raises(ProblemError, match=said):
        own.from_source("verifiers", file, None, agent=agent)


def test_an_empty_answer_is_the_policy_s_own_and_gets_a_verdict(
    tmp_path: Path, environment: VerifiersEnvironment
) -> None:
    agent, work, policy, verdict = attempted(tmp_path, environment, asking(environment), [""])
    assert work.stop is StopReason.submitted
    assert (agent.effort.turns, len(policy.seen)) == (1, 1)
    assert verdict == Verdict(solved=False, passed=0, total=1, error="EmptyModelResponseError")


def test_an_attempt_whose_sandbox_is_gone_before_the_reward_is_no_verdict(
    tmp_path: Path, environment: VerifiersEnvironment
) -> None:
    async def lose(policy: Policy, agent: ForeignAgent, running: asyncio.Task[StopReason]) -> None:
        await eventually(lambda: agent.recording.tree.nodes, "the first answer to be recorded", 200)
        assert isinstance(agent.workspace, VerifiersWorkspace)
        await agent.workspace._sandbox.close()

    with pytest.raises(SandboxGone):
        attempted(tmp_path, environment, asking(environment, turns=1000), ["3"], meanwhile=lose)


def test_an_attempt_at_another_example_than_was_meant_is_no_verdict(
    tmp_path: Path, environment: VerifiersEnvironment
) -> None:
    changed = msgspec.structs.replace(asking(environment), digest="other")
    with pytest.raises(InfrastructureError, match="another prompt than when the problem was made"):
        attempted(tmp_path, environment, changed, ["3"])


def test_a_deadline_in_the_middle_of_an_answer_is_scored(tmp_path: Path, environment: VerifiersEnvironment) -> None:
    async def late(policy: Policy, agent: ForeignAgent, running: asyncio.Task[StopReason]) -> None:
        await eventually(lambda: agent.recording.tree.nodes, "the first answer to be recorded", 200)
        policy.free.clear()
        await eventually(lambda: len(policy.seen) >= 2, "a second question", 200)
        agent.deadline = True
        running.cancel()

    agent, work, _, verdict = attempted(tmp_path, environment, asking(environment, turns=1000), ["3"], meanwhile=late)
    assert work.stop is StopReason.deadline
    assert verdict.solved
    assert not agent.endpoint._open
