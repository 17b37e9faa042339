"""Attempts of kind `verifiers` behind the recording endpoint, and a stand-in for the package where it is not installed.

The stand-in has the few names of `verifiers` 0.1 and `openai` that the runner inside the sandbox uses, with Python's own library.
"""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from services.rollout.attempt import Work
from services.rollout.endpoint.foreign import ForeignAgent
from shared.contracts.messages import StopReason, Verdict
from shared.environments import Grading
from shared.environments.verifiers import VerifiersEnvironment
from shared.environments.verifiers.problem import Source, VerifiersHidden, VerifiersProblem
from tests.integration.test_foreign_agent import played
from tests.laboratory import Laboratory
from tests.unit.endpoint.world import Policy, Said

VERIFIERS = """
import importlib
import openai

class ModelError(Exception):
    pass

class EmptyModelResponseError(ModelError):
    pass

class OpenAIChatCompletionsClient:
    def __init__(self, client):
        self.client = client

    async def get_response(self, messages, **fields):
        try:
            answer = await self.client.create(messages, **fields)
            if not answer["content"]:
                raise EmptyModelResponseError("nothing in the answer")
            return answer
        except (ModelError, openai.PermissionDeniedError, openai.AuthenticationError):
            raise
        except Exception as error:
            raise ModelError from error

def load_environment(name, **arguments):
    return importlib.import_module(name).load_environment(**arguments)
"""
OPENAI = """
import asyncio, json, urllib.error, urllib.request

class PermissionDeniedError(Exception):
    pass

class AuthenticationError(Exception):
    pass

class BadRequestError(Exception):
    pass

class AsyncOpenAI:
    def __init__(self, *, base_url, api_key, max_retries, timeout):
        self.url, self.key, self.timeout = base_url, api_key, timeout

    async def create(self, messages, **fields):
        body = json.dumps({"model": "etude", "messages": messages, **fields}).encode()
        headers = {"Authorization": "Bearer " + self.key, "Content-Type": "application/json"}
        asked = urllib.request.Request(self.url + "/chat/completions", body, headers)
        def send():
            try:
                return json.load(urllib.request.urlopen(asked, timeout=self.timeout))
            except urllib.error.HTTPError as error:
                kinds = {401: AuthenticationError, 403: PermissionDeniedError}
                raise kinds.get(error.code, BadRequestError)(error.read().decode()) from None
        return (await asyncio.to_thread(send))["choices"][0]["message"]
"""
# `turns`: answers that the rollout asks for. `script`: a program that the environment runs after each, as a policy's tool would.
ENVIRONMENT = """
import os, subprocess, sys
import verifiers

os.environ.setdefault("http_proxy", "http://127.0.0.1:9")  # as an image may: the endpoint is asked past it

QUESTIONS = [f"What is {n} + 1?" for n in range(5)]

class Rubric:
    def __init__(self, wrong):
        self.wrong = wrong

    async def score_rollout(self, state):
        if self.wrong == "rubric":
            raise ZeroDivisionError("an answer that is secret")
        said = [step["content"] for step in state["trajectory"]]
        share = sum(state["answer"] in text for text in said) / max(1, len(said))
        state["reward"] = float("nan") if self.wrong == "nan" else share
        state["metrics"] = {"share": share, "turns": len(said)}

class Environment:
    def __init__(self, turns, script, sampling, wrong):
        self.turns, self.script, self.sampling_args = turns, script, sampling
        self.rubric = Rubric(wrong)
        self.requires_group_rollouts = wrong == "group"

    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": text}], "answer": str(n + 1)} for n, text in enumerate(QUESTIONS)]

    async def rollout(self, row, client, model, sampling):
        state = {**row, "trajectory": [], "error": None}
        messages = list(row["prompt"])
        try:
            for _ in range(self.turns):
                answer = await client.get_response(messages, **sampling)
                state["trajectory"].append(answer)
                done = subprocess.run([sys.executable, "-c", self.script], capture_output=True, text=True)
                print(done.stdout, done.stderr, flush=True)
                messages += [answer, {"role": "user", "content": done.stdout or "Again."}]
        except (verifiers.ModelError, ) as error:
            state["error"] = error
        return state

def load_environment(turns=1, script="", sampling=None, wrong=""):
    print("the environment is loaded")
    if wrong == "load":
        raise RuntimeError("no data set here")
    return Environment(turns, script, sampling, wrong)
"""


def stand_in(folder: Path) -> Path:
    """Return a folder of agents whose virtual environment `verifiers` holds the stand-in and the environment `asking`."""
    made = folder / "verifiers"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (site,) = made.glob("lib/python*/site-packages")
    for name, text in (("verifiers", VERIFIERS), ("openai", OPENAI), ("asking", ENVIRONMENT)):
        (site / f"{name}.py").write_text(text)
    return folder


Found = tuple[ForeignAgent, Work, Policy, Verdict]


def environment_of(folder: Path, agents: Path) -> VerifiersEnvironment:
    return VerifiersEnvironment(dataclasses.replace(Laboratory(folder).places, agents=agents))


def problem_of(kind: VerifiersEnvironment, index: int = 0, **fields: Any) -> VerifiersProblem:
    """Return the problem of an example, as it is now. `fields`: of the source."""
    source = Source(**fields)
    (example,), _ = asyncio.run(kind.examples(source, index, 1))
    return VerifiersProblem(
        id=f"v-{index}", prompt=example.prompt, source=source, index=example.index, digest=example.digest
    )


def attempted(
    folder: Path,
    environment: VerifiersEnvironment,
    problem: VerifiersProblem,
    replies: list[Said],
    *,
    meanwhile: Callable[[Policy, ForeignAgent, asyncio.Task[StopReason]], Awaitable[None]] | None = None,
    solved_at: float = 1.0,
) -> Found:
    """Make an attempt and grade it."""
    agent, work, policy, *_ = played(folder, environment, problem, replies, meanwhile=meanwhile)
    hidden = VerifiersHidden(id=problem.id, solved_at=solved_at)
    (verdict,) = asyncio.run(environment.grade([Grading(problem, hidden, work.submission)]))
    assert isinstance(verdict, Verdict)
    return agent, work, policy, verdict
