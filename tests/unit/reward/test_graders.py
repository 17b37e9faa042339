"""Batches, patience and second chances, with graders that answer, fail or fall silent as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from services.reward import graders as module
from services.reward.config import RewardSettings
from services.reward.graders import MAX_SILENT, Graders, GradingFailed
from services.reward.jobs import LONG_QUEUE, QUEUE, Answer, Item, Job
from shared.contracts.graded import Graded
from shared.contracts.messages import AttemptKey, Verdict
from shared.contracts.run import Ref
from shared.objects import Objects, connect
from shared.objects.directory import DirectoryObjects
from shared.telemetry import Health
from tests import clock

REF = Ref(key="k", size=1, checksum="0" * 32)
SOLVED = Graded(verdict=Verdict(solved=True, passed=1, total=1))


def item(name: str) -> Item:
    key = AttemptKey(attempt=name, epoch=0, group="g", problem="p")
    return Item(run="r", key=key, trajectory=REF, pack=REF, pack_hidden=REF)


class Answering:
    """Graders that do what `decide` says per attempt: a verdict, a reason, or None: they die over the whole job."""

    def __init__(self, objects: Objects, decide: Callable[[str], Graded | str | None]) -> None:
        self.objects, self.decide = objects, decide
        self.jobs: list[list[str]] = []

    async def send(self, job: Job) -> None:
        names = [item.key.attempt for item in job.items]
        self.jobs.append(names)
        results = [self.decide(name) for name in names]
        if None not in results:
            answer = Answer(results=[r for r in results if r is not None])
            self.objects.put(job.answer_key, msgspec.json.encode(answer))

    async def close(self) -> None: ...


class Writing:
    """Graders whose answer to a job is whatever bytes `answer` gives for (its items, how many jobs came before it)."""

    def __init__(self, objects: Objects, answer: Callable[[int, int], bytes]) -> None:
        self.objects, self.answer = objects, answer
        self.jobs: list[Job] = []

    async def send(self, job: Job) -> None:
        self.objects.put(job.answer_key, self.answer(len(job.items), len(self.jobs)))
        self.jobs.append(job)

    async def close(self) -> None: ...


def play(
    tmp_path: Path, decide: Callable[[str], Graded | str | None], names: list[str]
) -> tuple[dict[str, Graded | BaseException], list[list[str]]]:
    """(what became of each attempt, the jobs in the order in which they were sent)"""

    async def scenario() -> tuple[dict[str, Graded | BaseException], list[list[str]]]:
        settings = RewardSettings(state=tmp_path, name="reward")
        objects = connect(settings.objects_url)
        jobs = Answering(objects, decide)
        health = Health("reward", settings)
        async with Graders(jobs, objects, health, batch=4, linger_s=0.02, patience_s=0.2, tries=2) as graders:
            outcomes = await asyncio.gather(*(graders.grade(item(name)) for name in names), return_exceptions=True)
        assert list(objects.list("grading/")) == []
        return dict(zip(names, outcomes, strict=True)), jobs.jobs

    return clock.run(scenario(), module)


def test_attempts_travel_in_batches(tmp_path: Path) -> None:
    outcomes, jobs = play(tmp_path, lambda _: SOLVED, [f"a{i}" for i in range(10)])
    assert list(outcomes.values()) == [SOLVED] * 10
    assert [len(job) for job in jobs] == [4, 4, 2]


def test_a_reported_failure_is_tried_again_and_then_given_up(tmp_path: Path) -> None:
    seen: list[str] = []

    def decide(name: str) -> Graded | str:
        seen.append(name)
        return SOLVED if name == "fine" or (name == "lucky" and seen.count(name) == 2) else "ObjectMissing: k"

    outcomes, _ = play(tmp_path, decide, ["fine", "lucky", "lost"])
    assert (outcomes["fine"], outcomes["lucky"]) == (SOLVED, SOLVED)
    assert isinstance(outcomes["lost"], GradingFailed)
    assert "ObjectMissing" in str(outcomes["lost"])
    assert seen.count("lost") == 2


def test_silence_of_all_graders_fails_nobody(tmp_path: Path) -> None:
    asked: list[str] = []

    def decide(name: str) -> Graded | None:
        asked.append(name)
        return SOLVED if len(asked) > MAX_SILENT else None

    outcomes, _ = play(tmp_path, decide, ["patient"])
    assert outcomes == {"patient": SOLVED}


def test_an_attempt_that_kills_its_graders_is_found_out_and_takes_nobody_along(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = RewardSettings(state=tmp_path, name="reward")
        objects = connect(settings.objects_url)
        jobs = Answering(objects, lambda name: None if name == "poison" else SOLVED)
        health = Health("reward", settings)
        async with Graders(jobs, objects, health, batch=4, linger_s=0.02, patience_s=0.2, tries=2) as graders:
            poison = asyncio.create_task(graders.grade(item("poison")))
            victim = asyncio.create_task(graders.grade(item("victim")))
            number = 0
            while not poison.done():  # the others' work goes on
                assert await graders.grade(item(f"a{(number := number + 1)}")) == SOLVED
            assert await victim == SOLVED
            with pytest.raises(GradingFailed, match="does it kill graders"):
                await poison
        assert {"poison", "victim"} <= set(jobs.jobs[0])
        assert [job for job in jobs.jobs if "poison" in job][-MAX_SILENT:] == [["poison"]] * MAX_SILENT

    clock.run(scenario(), module)


def test_the_last_attempt_of_all_is_given_up_too_if_it_kills_its_graders(tmp_path: Path) -> None:
    """Nobody else's jobs come after it."""
    outcomes, jobs = play(tmp_path, lambda name: None, ["poison"])
    with pytest.raises(GradingFailed, match="does it kill graders"):
        raise outcomes["poison"]  # type: ignore[misc]
    assert [] in jobs


class OneByOne(Answering):
    """A grader that takes `each_s` for a job, and takes jobs in the order in which they were sent."""

    each_s = 0.35
    turn = asyncio.Lock()

    async def send(self, job: Job) -> None:
        asyncio.get_running_loop().create_task(self._work(job))

    async def _work(self, job: Job) -> None:
        async with self.turn:
            await clock.passes(self.each_s)
            await super().send(job)


def test_who_waits_behind_slow_attempts_is_neither_asked_for_again_nor_given_up(tmp_path: Path) -> None:
    names = [f"a{number}" for number in range(40)]

    async def scenario() -> None:
        settings = RewardSettings(state=tmp_path, name="reward")
        objects = connect(settings.objects_url)
        jobs = OneByOne(objects, lambda name: SOLVED)
        patience_s = 8 * jobs.each_s  # the last of ten jobs waits longer
        health = Health("reward", settings)
        async with Graders(jobs, objects, health, batch=4, linger_s=0.02, patience_s=patience_s, tries=2) as graders:
            assert await asyncio.gather(*(graders.grade(item(name)) for name in names)) == [SOLVED] * len(names)
        assert sorted(name for job in jobs.jobs for name in job) == sorted(names)

    clock.run(scenario(), module)


def test_short_gradings_go_on_and_are_asked_for_again_while_a_long_one_is_out(tmp_path: Path) -> None:
    """The patience with a long grading holds for its own queue alone, and an answer there overtakes nothing here."""

    async def scenario() -> None:
        settings = RewardSettings(state=tmp_path, name="reward")
        objects = connect(settings.objects_url)
        queues: list[str] = []
        lost: list[str] = []

        class Losing(Answering):
            async def send(self, job: Job) -> None:
                queues.append(job.queue)
                if job.queue == LONG_QUEUE:
                    return  # it is being graded
                if not lost:
                    lost.append(job.answer_key)
                    return
                await super().send(job)

        jobs, health = Losing(objects, lambda _: SOLVED), Health("reward", settings)
        async with Graders(jobs, objects, health, batch=4, linger_s=0.02, patience_s=0.2, tries=2) as graders:
            long = asyncio.create_task(graders.grade(msgspec.structs.replace(item("long"), seconds=600.0)))
            assert await graders.grade(item("short")) == SOLVED
            assert not long.done()
            long.cancel()
        assert queues.count(LONG_QUEUE) == 1
        assert queues.count(QUEUE) >= 2
        assert len(lost) == 1

    clock.run(scenario(), module)


class Stumbling(DirectoryObjects):
    """Fails the first look at every key that `stumbles` names, as a store does that goes away for a moment."""

    def __init__(self, root: Path, stumbles: Callable[[str], bool]) -> None:
        super().__init__(root)
        self.stumbles, self.stumbled = stumbles, set[str]()

    def get(self, ref: Ref) -> bytes:
        if self.stumbles(ref.key) and ref.key not in self.stumbled:
            self.stumbled.add(ref.key)
            raise OSError("away")
        return super().get(ref)


def test_an_answer_is_not_lost_when_the_next_one_cannot_be_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = RewardSettings(state=tmp_path, name="reward")
        sent: list[Job] = []
        objects = Stumbling(tmp_path / "o", lambda key: len(sent) > 1 and key == sent[1].answer_key)

        class Late:
            async def send(self, job: Job) -> None:
                sent.append(job)
                if len(sent) == 2:  # both answers lie there at the same look
                    for each in sent:
                        objects.put(each.answer_key, msgspec.json.encode(Answer(results=[SOLVED])))

            async def close(self) -> None: ...

        health = Health("reward", settings)
        async with Graders(Late(), objects, health, batch=1, linger_s=0.0, patience_s=3.0, tries=2) as graders:
            outcomes = await asyncio.gather(*(graders.grade(item(name)) for name in ("first", "second")))
        assert outcomes == [SOLVED, SOLVED]
        assert objects.stumbled == {sent[1].answer_key}
        assert len(sent) == 2, "an answered job was given again"

    clock.run(scenario(), module)
    assert list(DirectoryObjects(tmp_path / "o").list("grading/")) == []


def test_an_answer_that_cannot_be_understood_is_asked_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = RewardSettings(state=tmp_path, name="reward")
        objects = connect(settings.objects_url)
        whole = msgspec.json.encode(Answer(results=[SOLVED]))
        jobs = Writing(objects, lambda _, before: whole if before else whole[:-1])
        health = Health("reward", settings)
        async with Graders(jobs, objects, health, batch=1, linger_s=0.0, patience_s=0.2, tries=2) as graders:
            assert await graders.grade(item("a")) == SOLVED
        assert len([job for job in jobs.jobs if job.items]) == 2

    clock.run(scenario(), module)


def test_an_answer_of_another_number_of_results_is_asked_for_again_and_stops_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = RewardSettings(state=tmp_path, name="reward")
        objects = connect(settings.objects_url)

        def answer(items: int, before: int) -> bytes:
            return msgspec.json.encode(Answer(results=[SOLVED for _ in range(items + (before == 0))]))

        jobs = Writing(objects, answer)
        health = Health("reward", settings)
        async with Graders(jobs, objects, health, batch=1, linger_s=0.0, patience_s=0.2, tries=2) as graders:
            assert await graders.grade(item("a")) == SOLVED
            assert await graders.grade(item("b")) == SOLVED

    clock.run(scenario(), module)


def test_work_in_the_background_that_ends_is_told_to_whoever_waits_for_it(tmp_path: Path) -> None:
    """Else attempts would wait for ever at a service that seems well."""

    async def scenario() -> None:
        settings = RewardSettings(state=tmp_path, name="reward")
        health = Health("reward", settings)
        objects = connect(settings.objects_url)
        jobs = Answering(objects, lambda _: SOLVED)
        async with Graders(jobs, objects, health, batch=1, linger_s=0.0, patience_s=0.2, tries=2) as graders:
            health.clear = None  # type: ignore[assignment,method-assign]
            waiting = asyncio.create_task(graders.grade(item("a")))
            with pytest.raises(TypeError):
                await graders.ended()
            waiting.cancel()

    clock.run(scenario(), module)
