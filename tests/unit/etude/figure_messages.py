"""What is said of a run, for the tests of its figures: a trainer's life with forks, evaluations, changes of state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from etude.figures.points import Heard
from shared.contracts import messages as m
from shared.contracts.run import Ref
from tests.ruling import status

RUN = "r-20260101T000000-aaaa"
REF = Ref(key=f"runs/{RUN}/config.json", size=1, checksum="c" * 32)


def step(number: int, serial: int, incarnation: int = 0, **metrics: float) -> m.StepCommitted:
    figures = {"loss": number + 0.25 * incarnation, "age_max": 2.0, "mismatch_k3_version_3": 0.5} | metrics
    return m.StepCommitted(
        run=RUN, incarnation=incarnation, step=number, serial=serial, groups={"g": 2, "h": 1}, metrics=figures
    )


def begun(incarnation: int, at_step: int) -> m.IncarnationStarted:
    return m.IncarnationStarted(run=RUN, incarnation=incarnation, step=at_step, parent=incarnation - 1)


def published(serial: int, at_step: int, incarnation: int = 0) -> m.PolicyPublished:
    return m.PolicyPublished(run=RUN, serial=serial, incarnation=incarnation, step=at_step, parent=-1, manifest=REF)


def evaluated(name: str, serial: int, pass_at_1: float = 0.5) -> m.EvalFinished:
    return m.EvalFinished(run=RUN, eval=name, serial=serial, report=REF, figures={"pass_at_1": pass_at_1})


def word(state: str, **more: Any) -> m.RunStatus:
    return status(RUN, state, REF, **more)


def heard(*messages: Any, first: float = 1000.0) -> list[Heard]:
    """Each said a second after the one before it."""
    return [Heard(_said(message, first + second), first + second) for second, message in enumerate(messages)]


def _said(message: Any, at: float) -> Any:
    made_now = isinstance(message, m.RunStatus) and message.since > 1e9
    return msgspec.structs.replace(message, since=at) if made_now else message


def life(seed: int, length: int) -> list[Heard]:
    """A run: steps and evaluations, now and then a fork to an earlier step, a pause, and something said twice."""
    chance = random.Random(seed)
    said: list[Any] = [word("running"), begun(0, 0), published(0, 0)]
    at, incarnation, serial = 0, 0, 0
    for number in range(length):
        match chance.choice(("step", "step", "step", "step", "fork", "evaluation", "pause", "again")):
            case "step":
                at, serial = at + 1, serial + 1
                said += [published(serial, at, incarnation), step(at, serial, incarnation)]
            case "fork":
                at, incarnation, serial = chance.randint(0, at), incarnation + 1, serial + 1
                said += [begun(incarnation, at), published(serial, at, incarnation)]
            case "evaluation":
                said.append(evaluated(f"e{number}", chance.randint(0, serial), chance.random()))
            case "pause":
                said += [word("paused"), word("running")]
            case "again":
                said.append(chance.choice(said))
    return heard(*said)


def overtaking(said: Sequence[Heard], seed: int) -> list[Heard]:
    """The same in the order of each topic, the topics in any order among each other."""
    chance = random.Random(seed)
    topics: dict[str, list[Heard]] = {"steps": [], "policies": [], "evals": [], "control": []}
    for one in said:
        match one.message:
            case m.StepCommitted() | m.IncarnationStarted():
                topics["steps"].append(one)
            case m.PolicyPublished():
                topics["policies"].append(one)
            case m.EvalFinished():
                topics["evals"].append(one)
            case _:
                topics["control"].append(one)
    mixed = []
    while left := [queue for queue in topics.values() if queue]:
        mixed.append(chance.choice(left).pop(0))
    return mixed
