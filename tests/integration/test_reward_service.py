"""Reward and graders as processes of their own: what is finished gets scored, whoever dies."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from services.reward import grader
from shared.contracts import topics
from shared.contracts.graded import Graded, verdict_key
from shared.contracts.messages import (
    Alert,
    AttemptKey,
    RolloutFailed,
    RolloutScored,
    StopReason,
    Verdict,
)
from shared.contracts.run import Purpose, Ref, RewardConfig
from shared.problems import FunctionHidden
from tests.integration.reward_platform import FUNCTIONS, RIGHT, RUN, SLOW, WRONG, Breakable, case, key_of, platform
from tests.patience import eventually, patient, quiet
from tests.plugins import forget
from tests.ruling import status

POISON = "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)"

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")


@pytest.fixture(scope="module", autouse=True)
def _close_sandboxes() -> Iterator[None]:
    yield
    FUNCTIONS.close_sync()


@pytest.mark.usefixtures("platform_stores")
def test_right_wrong_and_hopeless_attempts_are_scored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            async with p.grader_here():
                await p.finish("right", RIGHT)
                await p.finish("wrong", WRONG, stop=StopReason.deadline)
                await p.finish("syntax", "def f(x) return")
                await p.finish("endless", "def f(x):\n    while True: pass")
                await p.finish("exit", "import os\ndef f(x): os._exit(0)")
                await p.finish("copied", "import origin\ndef f(x): return origin.f(x)")
                await p.finish("evaluated", WRONG, purpose=Purpose.evaluate, first_edit=RIGHT)
                await p.finish("same", RIGHT, purpose=Purpose.evaluate, first_edit=RIGHT)
                right, wrong, syntax = [await p.outcome(n) for n in ("right", "wrong", "syntax")]
                assert isinstance(right, RolloutScored)
                assert right.verdict == Verdict(solved=True, passed=3, total=3)
                assert right.reward == 1.0
                assert right.terms == {"solved": 1.0, "no_submit": 0.0}
                assert isinstance(wrong, RolloutScored)
                assert wrong.verdict == Verdict(solved=False, passed=0, total=3)
                assert wrong.reward == -0.25
                assert isinstance(syntax, RolloutScored)
                assert (syntax.verdict.error, syntax.reward) == ("SyntaxError", 0.0)
                for name, error in (("endless", "Timeout"), ("exit", "Died"), ("copied", "ModuleNotFoundError")):
                    hopeless = await p.outcome(name)
                    assert isinstance(hopeless, RolloutScored)
                    assert hopeless.verdict == Verdict(solved=False, passed=0, total=3, error=error)
                evaluated, same = await p.outcome("evaluated"), await p.outcome("same")
                assert isinstance(evaluated, RolloutScored)
                assert (evaluated.verdict.solved, evaluated.verdict.first_edit_solved) == (False, True)
                assert isinstance(same, RolloutScored)
                assert same.verdict == Verdict(solved=True, passed=3, total=3, first_edit_solved=True)
            assert list(p.objects.list("grading/")) == []

    asyncio.run(scenario())


def test_what_cannot_be_graded_fails_and_is_never_a_reward(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            missing = Ref(key="runs/none", size=1, checksum="0" * 32)
            damaged = p.objects.put("damaged", b"no trajectory")
            key = key_of("verdict")
            verdict = verdict_key(RUN, key, p.keep(key, RIGHT))
            p.objects.put(verdict, msgspec.json.encode(Graded(verdict=Verdict(solved=True, passed=3, total=3))))
            path = tmp_path / "objects" / verdict
            path.write_bytes(path.read_bytes().replace(b"3", b"4"))
            async with p.grader_here():
                await p.finish("missing", RIGHT, trajectory=missing)
                await p.finish("damaged", RIGHT, trajectory=damaged)
                await p.finish(
                    "unknown", RIGHT, pack_hidden=p.lines("packs/other", FunctionHidden(id="q", cases=[case(1)]))
                )
                await p.finish("verdict", RIGHT)
                await p.finish("fine", RIGHT)
                for name, reason in (
                    ("missing", "ObjectMissing"),
                    ("damaged", "not a traj"),
                    ("unknown", "no problem 'p'"),
                    ("verdict", "ObjectDamaged"),
                ):
                    failed = await p.outcome(name)
                    assert isinstance(failed, RolloutFailed)
                    assert reason in failed.reason
                    assert failed.trajectory is not None
                    assert failed.again == ("sample" if name in ("missing", "damaged") else "grade")
                assert isinstance(await p.outcome("fine"), RolloutScored)

    asyncio.run(scenario())


def test_a_failed_rollout_passes_by(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            key = AttemptKey(attempt="lost", epoch=0, group="g", problem="p")
            await p.bus.publish(
                topics.ROLLOUTS_FINISHED, "lost", RolloutFailed(run=RUN, key=key, reason="x", worker="w")
            )
            async with p.grader_here():
                await p.finish("fine", RIGHT)
                await p.outcome("fine")
            assert "lost" not in p.outcomes
            await p.until_acknowledged()

    asyncio.run(scenario())


@pytest.mark.usefixtures("platform_stores")
def test_a_grader_killed_in_mid_batch_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            names = [f"a{i}" for i in range(6)]
            with p.grader("first") as first:
                await p.finish("warm", RIGHT)
                await p.outcome("warm")
                for name in names:
                    await p.finish(name, SLOW)
                await p.until_begun(names[0], "first")
                first.send_signal(signal.SIGKILL)
                assert len(names) > len([name for name in names if name in p.outcomes])  # more seconds' work was left
            async with p.grader_here():
                outcomes = [await p.outcome(name) for name in names]
            assert all(isinstance(o, RolloutScored) and o.verdict.solved for o in outcomes)
            assert all(len(p.outcomes[name]) == 1 for name in names)

    asyncio.run(scenario())


def test_a_grader_whose_sandbox_breaks_takes_nothing_more_until_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grader, "CANARY_EVERY_S", 0.2)
    sandboxes = Breakable()

    async def scenario() -> None:
        async with platform(tmp_path, patience_s=1.0) as p, p.service(), p.grader_here(sandboxes.functions) as health:
            await p.announce()
            await p.finish("warm", RIGHT)
            await p.outcome("warm")
            sandboxes.break_down()
            for i in range(4):
                await p.finish(f"a{i}", RIGHT)
            await eventually(lambda: not health.ready)
            await quiet(2.5, "attempts fail, after two tries a second apart, where the grader's sandbox is to blame")
            assert set(p.outcomes) == {"warm"}
            assert not health.ready
            sandboxes.broken = False
            outcomes = [await p.outcome(f"a{i}", 60) for i in range(4)]
            assert all(isinstance(o, RolloutScored) and o.verdict.solved for o in outcomes)
            assert health.ready

    asyncio.run(scenario())
    sandboxes.functions.close_sync()


def test_an_attempt_that_breaks_its_sandbox_takes_no_neighbour_along(tmp_path: Path) -> None:
    sandboxes = Breakable()

    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            await p.finish("poison", POISON)
            for i in range(6):
                await p.finish(f"a{i}", RIGHT)
            await p.until_sent(7)
            async with p.grader_here(sandboxes.functions):
                outcomes = [await p.outcome(f"a{i}", 60) for i in range(6)]
                poison = await p.outcome("poison", 60)
            assert all(isinstance(o, RolloutScored) and o.verdict.solved for o in outcomes)
            assert isinstance(poison, RolloutFailed)
            assert "died twice under one run" in poison.reason

    asyncio.run(scenario())
    sandboxes.functions.close_sync()


def test_two_rollouts_of_one_epoch_get_a_verdict_each_on_their_own_files(tmp_path: Path) -> None:
    """Two workers may finish the same epoch. Neither gets the verdict on what the other one made, in whatever order."""

    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            async with p.grader_here():
                for name, sources in (("a", (WRONG, RIGHT)), ("b", (RIGHT, WRONG))):
                    sent = [await p.finish(name, source) for source in sources]
                    await eventually(lambda name=name: len(p.outcomes.get(name, [])) == 2)
                    told = {o.trajectory: o.verdict.solved for o in p.outcomes[name] if isinstance(o, RolloutScored)}
                    assert [told[word.trajectory] for word in sent] == [source == RIGHT for source in sources]

    asyncio.run(scenario())


def test_the_first_verdict_wins(tmp_path: Path) -> None:
    """An attempt that comes again, to another grader, keeps the verdict that was written first."""

    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            earlier = Graded(verdict=Verdict(solved=False, passed=1, total=3), grader="earlier")
            key = key_of("a")
            p.objects.put_if_absent(verdict_key(RUN, key, p.keep(key, RIGHT)), msgspec.json.encode(earlier))
            async with p.grader_here():
                await p.finish("a", RIGHT)
                first = await p.outcome("a")
                await p.finish("a", RIGHT)
                await eventually(lambda: len(p.outcomes["a"]) == 2)
                await p.finish("a", RIGHT, epoch=1)
                await eventually(lambda: len(p.outcomes["a"]) == 3)
            verdicts = [o.verdict for o in p.outcomes["a"] if isinstance(o, RolloutScored)]
            assert isinstance(first, RolloutScored)
            assert verdicts[:2] == [earlier.verdict] * 2
            assert verdicts[2].solved

    asyncio.run(scenario())


def test_a_service_that_restarts_takes_up_what_was_not_scored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p:
            await p.announce()
            async with p.service():
                for i in range(5):
                    await p.finish(f"a{i}", RIGHT)
                await p.until_sent(5)
            assert p.outcomes == {}
            async with p.service():
                async with p.grader_here():
                    for i in range(5):
                        assert isinstance(await p.outcome(f"a{i}"), RolloutScored)

    asyncio.run(scenario())


def test_attempts_wait_for_graders_that_are_away_and_the_service_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path, patience_s=0.5) as p, p.service() as health:
            await p.announce()
            await p.finish("a", RIGHT)
            await eventually(lambda: not health.ready)
            assert "graders" in health._waits
            await p.until_sent(3)  # the same attempt, time and again: silence alone is no failure
            assert p.outcomes == {}
            async with p.grader_here():
                assert isinstance(await p.outcome("a"), RolloutScored)
            assert health.ready

    asyncio.run(scenario())


def test_a_new_reward_configuration_in_mid_run_counts_for_its_attempts_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            async with p.grader_here():
                await p.finish("early", RIGHT, reward_config="double")  # before it was announced
                await p.finish("old", RIGHT)
                await p.outcome("old")
                reward = RewardConfig(id="double", solved=2.0, length=None, behaviour={})
                changed = msgspec.structs.replace(p.config, reward=reward)
                ref = p.objects.put(f"runs/{RUN}/config-2.json", msgspec.json.encode(changed))
                await p.bus.publish(topics.RUNS_STATE, RUN, status(RUN, "running", ref))
                await p.finish("old again", RIGHT)
                scores = [await p.outcome(name) for name in ("early", "old again")]
            assert [(s.reward, s.reward_config) for s in scores if isinstance(s, RolloutScored)] == [
                (2.0, "double"),
                (1.0, "default"),
            ]

    asyncio.run(scenario())


def test_an_unusable_reward_configuration_fails_its_attempts_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            p.config = msgspec.structs.replace(p.config, reward=RewardConfig(id="default", behaviour={"charm": 1.0}))
            await p.announce()
            await p.finish("a", RIGHT)
            failed = await p.outcome("a")
            assert isinstance(failed, RolloutFailed)
            assert "reward.behaviour: found 'charm'; allowed: broken_tool_call" in failed.reason

    asyncio.run(scenario())


SICK = """
from shared.terms import Found

def sick(seen):
    return Found(float("nan"))
"""


@pytest.fixture
def sick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with a term that gives no number."""
    folder = tmp_path / "package"
    about = folder / "sick_terms-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "sick_terms.py").write_text(SICK)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sick-terms\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[etude.reward_terms]\nsick = sick_terms:sick\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    forget("sick_terms")
    yield
    forget("sick_terms")


@pytest.mark.usefixtures("sick")
def test_a_term_that_gives_no_number_adds_nothing_and_is_named_once_with_an_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            reward = RewardConfig(id="default", length=None, behaviour={"sick": -0.01}, behaviour_apply="all")
            p.config = msgspec.structs.replace(p.config, reward=reward)
            await p.announce()
            async with p.grader_here():
                for name in ("a", "b"):
                    await p.finish(name, RIGHT)
                scored = [await p.outcome(name) for name in ("a", "b")]
            for one in scored:  # a verdict, not a failure: nothing is sampled again
                assert isinstance(one, RolloutScored)
                assert (one.reward, one.terms) == (1.0, {"solved": 1.0})
            heard: list[Alert] = []

            async def listen() -> None:
                async for delivery in p.bus.deliveries([topics.ALERTS], None, 10):
                    heard.append(delivery.message)
                    delivery.done()

            listening = asyncio.create_task(listen())
            await eventually(lambda: heard, "the alert")
            await quiet(0.3, "a second alert about the same term")
            listening.cancel()
            (alert,) = heard
            assert (alert.name, alert.run) == ("term_quarantined", RUN)
            assert "the term 'sick' of reward configuration 'default'" in alert.what
            assert "found nan; expected a finite number" in alert.what
            assert alert.examples[0] in {one.key.attempt for one in scored}

    asyncio.run(scenario())


@pytest.mark.usefixtures("platform_stores")
def test_a_grader_that_is_told_to_stop_finishes_its_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            with p.grader() as process:
                await p.finish("warm", RIGHT)
                await p.outcome("warm")
                await p.finish("a", SLOW)
                await p.until_begun("a")
                process.send_signal(signal.SIGTERM)
                assert isinstance(await p.outcome("a"), RolloutScored)
                assert await asyncio.to_thread(process.wait, patient(30)) == 0

    asyncio.run(scenario())
