"""The example of docs/environments.md, installed as a package of its own would be: found by its entry point, nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.rollout.agent import Agent
from services.rollout.generation import Generation
from shared.contracts.messages import StopReason
from shared.contracts.run import Sampling
from shared.environments import Grading, Places
from shared.environments.registry import Environments, UnknownKind
from shared.problems import Hidden, Problem
from shared.problems.importing import read_lines
from shared.problems.pack import Lines, write
from shared.renderers.fitting import fit
from shared.renderers.formats.chatml import Card, ChatML
from shared.renderers.vocabulary import Vocabulary
from tests.renderer_checkpoints import QWEN, tokenizer_of

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "arithmetic.py"
LINE = {"id": "sum-1", "kind": "arithmetic", "prompt": "What is 2 + 3?", "hidden": {"value": 5}}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "arithmetic.py").write_text(EXAMPLE.read_text())
    about = tmp_path / "arithmetic-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: arithmetic\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[etude.environments]\narithmetic = arithmetic:Arithmetic\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("arithmetic", None)


class Script:
    def __init__(self, chat: ChatML, *said: str) -> None:
        self.chat, self.said = chat, list(said)

    @property
    def partial(self) -> Generation | None:
        return None

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        ids = [*self.chat.vocabulary.ids(self.said.pop(0)), self.chat.stop_tokens[0]]
        n = len(ids)
        return Generation(
            tokens=ids,
            logprobs_N=np.full(n, -0.5, np.float32),
            versions_N=np.zeros(n, np.int32),
            oldest_kv_version=0,
            finish="stop",
        )


def answer(value: object) -> str:
    return "<tool_call>\n" + json.dumps({"name": "answer", "arguments": {"value": value}}) + "\n</tool_call>"


@pytest.mark.usefixtures("installed")
def test_an_environment_of_another_package_is_read_packed_admitted_attempted_and_graded(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    (line,) = read_lines(path)
    public = Lines(write([line.problem]), Problem)
    hidden = Lines(write([line.hidden]), Hidden)
    problem, secret = public["sum-1"], hidden["sum-1"]
    assert (problem, secret) == (line.problem, line.hidden)

    chat = ChatML(Vocabulary(tokenizer_of(QWEN)), Card(context=4096))
    fitting = fit([line], chat)
    assert ([left.problem for left in fitting.lines], fitting.unproven(), fitting.doubt()) == ([problem], "", "")

    environment = Environments(Places()).of(problem)
    (outcome,) = asyncio.run(environment.admit([(problem, secret)]))
    assert (outcome.reason, outcome.proven) == ("", True)

    async def attempt() -> tuple[StopReason, Agent]:
        workspace = await environment.open(problem, Sampling())
        agent = Agent(chat, Script(chat, answer("five"), answer(5)), workspace, Sampling(max_completion_tokens=2000))
        return await agent.run(), agent

    stop, agent = asyncio.run(attempt())
    assert stop is StopReason.submitted
    assert (agent.effort.tool_calls, agent.effort.broken_tool_calls) == (2, 1)
    work = asyncio.run(agent.workspace.submission())
    (verdict,) = asyncio.run(environment.grade([Grading(problem, secret, work)]))
    assert verdict.solved


@pytest.mark.usefixtures("installed")
def test_a_broken_call_of_the_last_turn_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    problem = read_lines(path)[0].problem
    chat = ChatML(Vocabulary(tokenizer_of(QWEN)), Card(context=4096))

    async def attempt() -> Agent:
        workspace = await Environments(Places()).of(problem).open(problem, Sampling())
        said = Script(chat, answer("five") + answer(5))
        agent = Agent(chat, said, workspace, Sampling(max_completion_tokens=2000))
        assert await agent.run() is StopReason.submitted
        return agent

    effort = asyncio.run(attempt()).effort
    assert (effort.turns, effort.tool_calls, effort.broken_tool_calls) == (1, 2, 1)


def test_the_example_has_fewer_than_sixty_lines_and_stands_whole_in_the_documentation() -> None:
    text = EXAMPLE.read_text()
    assert text.count("\n") < 60
    assert text in (EXAMPLE.parents[1] / "environments.md").read_text()


def test_an_unknown_kind_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    with pytest.raises(ValueError, match=r"'kind'.*'arithmetic'.*allowed: agent, function, repository"):
        read_lines(path)
    with pytest.raises(UnknownKind, match=r"found 'arithmetic'; allowed: agent, function, repository"):
        Environments(Places()).named("arithmetic")
