"""An attempt that dies at any turn and is continued by another worker leaves the same bytes as one that never died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.attempts.world import Memory, Talk, World, rng_of
from services.rollout.agent import Agent
from services.rollout.attempt import Work, trajectory_of
from services.rollout.checkpoint import Damaged, due, pack, unpack, unpack_part
from services.rollout.keeping import BEGUN_AGAIN, Keeper, Left
from services.rollout.recorder import replayed
from shared.contracts.messages import StopReason
from shared.contracts.run import Ref, Sampling
from shared.contracts.trajectory import pack as packed
from shared.contracts.trajectory import pack_routing
from shared.environments.function.actions import Observation, Tool
from shared.environments.function.workspace import FunctionWorkspace
from shared.problems import FunctionProblem
from shared.renderers.registry import load_renderer
from tests.guard.compact import Writer, write_checkpoint
from tests.guard.policy import Policy
from tests.guard.problems import FIXED_CONTEXT, fixed

PAIRS = fixed()


class Solves:
    """Visible tests that pass for the solution alone."""

    def __init__(self, solution: dict[str, str]) -> None:
        self.solution = solution

    async def run(self, problem: FunctionProblem, files: dict[str, str]) -> Observation:
        return Observation(Tool.test) if files == self.solution else Observation(Tool.test, failing=0, got="0")


class Killed(BaseException):
    """The worker's process is gone."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat") / "checkpoint"
    write_checkpoint(directory, None, FIXED_CONTEXT, moe=True)
    return directory


class Case:
    """One attempt of the guard's policy, with everything that may happen in it decided by `seed`."""

    def __init__(self, chat: Path, seed: int) -> None:
        rng = rng_of("case", seed)
        self.problem, hidden = rng.choice(PAIRS)
        writer = Writer(chat / "tokenizer.json")
        policy = Policy(writer, (self.problem, hidden), rng)

        def say(context: list[int], room: int, rng: Any) -> tuple[list[int], str]:
            completion = policy.complete(context, room, rng)
            return completion.tokens, completion.finish

        self.world = World(load_renderer(chat), say, tests=Solves(dict(hidden.solution)))
        self.seed, self.moe = seed, rng.random() < 0.5
        self.sampling = Sampling(
            retry=rng.choice(("fresh", "append")),
            max_completion_tokens=4 * FIXED_CONTEXT,
            max_turns=rng.choice((6, 12, 24)),
            max_edits=rng.choice((4, 16)),
            max_repeats=rng.choice((0, 6)),
            summary_trigger_tokens=rng.choice((0, 1, FIXED_CONTEXT // 3)),
        )

    def keeper(self, epoch: int, every_s: float = 0.0, checkpoint: Ref | None = None) -> Keeper:
        request = self.world.request(f"a-{self.seed}", self.sampling, epoch=epoch, checkpoint=checkpoint)
        return self.world.keeper(request, every_s, time.monotonic)

    def talk(self, before: Callable[[int], Any] = lambda _: None) -> Talk:
        return Talk(self.world.policy, (self.seed,), self.moe, before)

    async def life(self, keeper: Keeper, talk: Talk, leaving: Callable[[], bool] = lambda: False) -> bytes:
        agent = await self.world.begun(keeper, talk, self.problem)
        stop = await keeper.run(agent, talk, leaving)  # type: ignore[arg-type]
        return await self.outcome(agent, keeper, stop)

    async def outcome(self, agent: Agent, keeper: Keeper, stop: StopReason) -> bytes:
        request = self.world.request(f"a-{self.seed}", self.sampling)
        work = Work(stop, await agent.workspace.submission(), dict(agent.workspace.notes), tuple(keeper.decisions))
        rows = agent.recorder.routing()
        return packed(trajectory_of(request, agent, work)) + (b"" if rows is None else pack_routing(rows))

    @property
    def newest(self) -> Ref | None:
        told = self.world.announced.get(f"a-{self.seed}")
        return None if told is None else told.checkpoint


def whole(case: Case) -> bytes:
    return asyncio.run(case.life(case.keeper(0, every_s=1e9), case.talk()))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_an_attempt_whose_workers_die_at_any_turn_leaves_the_same_bytes(
    chat: Path, seed: int, deaths: list[int]
) -> None:
    """Each life dies while its n-th turn is sampled, so that no more than that turn is sampled twice."""
    case = Case(chat, seed)
    expected = whole(case)
    asked: list[int] = []  # generations of all lives

    async def lives() -> bytes:
        for epoch, death in enumerate([*deaths, 10**9]):
            seen = 0

            def dies(_: int, death: int = death) -> None:
                nonlocal seen
                asked.append(1)
                if seen == death:
                    raise Killed
                seen += 1

            try:
                return await case.life(case.keeper(epoch, 0.0, case.newest), case.talk(dies))
            except Killed:
                continue
        raise AssertionError

    assert asyncio.run(lives()) == expected
    once: list[int] = []
    asyncio.run(case.life(case.keeper(9, 1e9), case.talk(lambda _: once.append(1))))
    assert len(asked) <= len(once) + len(deaths)  # at most one turn lost with each worker


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 5))
def test_a_worker_that_leaves_loses_nothing_even_of_a_turn_that_is_being_sampled(
    chat: Path, seed: int, turn: int
) -> None:
    case = Case(chat, seed)
    expected = whole(case)

    async def lives() -> bytes:
        keeper, left = case.keeper(0, 1e9), False
        talk = case.talk()
        agent = await case.world.begun(keeper, talk, case.problem)

        class Slow(Talk):
            async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Any:
                nonlocal left
                whole = await Talk.generate(self, tokens, max_new_tokens=max_new_tokens, first_row=first_row)
                if self.requests == turn + 1:
                    left = True
                    try:
                        asyncio.get_running_loop().call_soon(task.cancel)
                        await asyncio.Event().wait()
                    except asyncio.CancelledError:
                        self.partial = whole  # what the engine said when it was told to end it
                        raise
                return whole

        slow = Slow(talk.policy, talk.facts, talk.moe)
        agent.model = slow
        task = asyncio.create_task(keeper.run(agent, slow, lambda: left))  # type: ignore[arg-type]
        try:
            return await case.outcome(agent, keeper, await task)
        except Left:
            assert keeper.saved is not None
            again, talk = case.keeper(1, 1e9, case.newest), case.talk()
            found = await again.load(keeper.saved.ref)
            assert found.checkpoint.conversation.partial is not None
            return await case.life(again, talk)

    assert asyncio.run(lives()) == expected


def test_a_checkpoint_that_is_lost_or_damaged_begins_the_attempt_again_and_says_so(chat: Path) -> None:
    case = Case(chat, 3)
    expected = whole(case)
    asyncio.run(case.life(case.keeper(0), case.talk()))
    ref = case.newest
    assert ref is not None
    good = case.world.objects.data[ref.key]
    for data in (None, b"", good[:-3], pack([])):
        if data is None:
            del case.world.objects.data[ref.key]
        else:
            case.world.objects.data[ref.key] = data

        async def life() -> tuple[bytes, dict[str, str]]:
            keeper, talk = case.keeper(1, 1e9, ref), case.talk()
            agent = await case.world.begun(keeper, talk, case.problem)
            notes = dict(agent.workspace.notes)
            agent.workspace.notes.clear()
            return await case.outcome(agent, keeper, await keeper.run(agent, talk, lambda: False)), notes  # type: ignore[arg-type]

        found, notes = asyncio.run(life())
        assert found == expected
        assert ref.key in notes[BEGUN_AGAIN]


def test_objects_of_checkpoints_are_few_while_an_attempt_runs_and_gone_when_it_is_over(chat: Path) -> None:
    case = next(c for seed in range(100) if (c := Case(chat, seed)) and _turns(c) > 5)

    async def lives() -> None:
        keeper = case.keeper(0)
        await case.life(keeper, case.talk())
        wholes = [key for key in case.world.objects.data if "/part-" not in key]
        assert len(wholes) == 2
        assert len(keeper.parts) == len(case.world.objects.data) - 2
        await keeper.forget()
        assert case.world.objects.data == {}

    asyncio.run(lives())


def _turns(case: Case) -> int:
    seen: list[int] = []
    asyncio.run(case.life(case.keeper(0, 1e9), case.talk(seen.append)))
    return len(seen)


def test_an_object_store_that_is_away_costs_checkpoints_and_no_attempt(chat: Path) -> None:
    class Away(Memory):
        def put(self, key: str, data: bytes) -> Ref:
            raise OSError("away")

    case = Case(chat, 5)
    expected = whole(case)
    case.world.objects = Away()
    assert asyncio.run(case.life(case.keeper(0), case.talk())) == expected
    assert case.newest is None


@given(st.binary(max_size=200))
def test_other_bytes_are_no_checkpoint(data: bytes) -> None:
    for read in (unpack, unpack_part):
        with pytest.raises(Damaged):
            read(data)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_a_journal_that_was_packed_makes_the_same_recorder(chat: Path, seed: int) -> None:
    case = Case(chat, seed)

    async def life() -> Agent:
        keeper, talk = case.keeper(0, 1e9), case.talk()
        agent = await case.world.begun(keeper, talk, case.problem)
        await keeper.run(agent, talk, lambda: False)  # type: ignore[arg-type]
        return agent

    recorder = asyncio.run(life()).recorder
    again = replayed(unpack_part(pack(recorder.journal)))
    assert again.context == recorder.context
    assert again.rows == recorder.rows
    assert (again.oldest_version, again.newest_version) == (recorder.oldest_version, recorder.newest_version)
    assert pack(again.journal) == pack(recorder.journal)


def test_a_checkpoint_is_due_after_each_turn_or_after_so_many_seconds() -> None:
    assert due(1.0, 1.0, 0.0)
    assert [now for now in range(12) if due(now, 4.0, 5.0)] == [9, 10, 11]


def test_a_workspace_that_is_restored_runs_the_same_calls_alike(chat: Path) -> None:
    problem = PAIRS[0][0]

    async def scenario() -> None:
        first = FunctionWorkspace(problem, Sampling(), Solves({}))
        first.brief()
        saved = await first.save()
        assert saved is not None
        second = FunctionWorkspace(problem, Sampling(), Solves({}))
        brief = await second.restore(saved)
        assert brief == first.brief()
        assert await second.save() == await first.save()

    asyncio.run(scenario())
