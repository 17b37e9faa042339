"""`etude measure`: which version is measured where, and what a person reads of all that was."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard

from etude import measuring
from etude.measuring import Known, Refused
from shared import objects as stores
from shared import weights
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.ids import REPORT, evaluation_prefix, policy_prefix
from shared.contracts.run import Ref
from shared.settings import ServiceSettings
from tests.ruling import status
from tests.unit.etude.test_run_commands import A, B, Folder, folder
from tests.unit.scheduler.world import config

REF = Ref(key="x", size=1, checksum="0" * 32)
PROBLEMS = 3


def served(run: str, serial: int, pool: str = "rollout", **said: object) -> m.PolicyApplied:
    given = {"replica": f"{pool}-0", "url": f"http://{pool}-0", **said}
    return m.PolicyApplied(run=run, pool=pool, serial=serial, **given)  # type: ignore[arg-type]


def published(serial: int, step: int) -> m.PolicyPublished:
    return m.PolicyPublished(run=A, serial=serial, incarnation=0, step=step, parent=-1, manifest=REF)


def word(state: str, run: str = A) -> m.RunStatus:
    return status(run, state, *([REF] if state == "running" else []))


def known(*messages: object) -> Known:
    found = Known()
    for at, message in enumerate(messages):
        found.hear(message, at)
    return found


def test_the_run_started_last_and_its_newest_version_are_meant_where_none_is_named() -> None:
    found = known(word("running"), published(0, 0), published(3, 3), word("running", B))
    assert [
        (run.run, serial) for run, serial in (found.chosen("", None), found.chosen(A, None), found.chosen(A, 0))
    ] == [
        (B, 0),
        (A, 3),
        (A, 0),
    ]
    with pytest.raises(Refused, match=r"--version 2: .* has published versions 0 to 3"):
        found.chosen(A, 2)
    with pytest.raises(Refused, match=f"run 'r-x': not known here; the newest are {B}, {A}"):
        found.chosen("r-x", None)
    with pytest.raises(Refused, match="`etude start` begins one"):
        known().chosen("", None)


@pytest.mark.parametrize(
    ("said", "replicas", "way_out"),
    [
        (["paused"], [served(A, 3)], ""),
        (["finished"], [served(A, 3)], ""),
        ([], [served(A, 4), served(A, 3, "evaluation")], ""),
        ([], [served(A, 4), served(A, 0, "evaluation", on_request=True)], ""),
        ([], [served(A, 4), served(A, 0, "evaluation")], "rollout-0 serves 4, evaluation-0 serves 0"),
        ([], [served(A, 3)], "is running, and its engines go from version to version: `etude pause"),
        (["stopping"], [served(A, 3)], "is stopping, and its engines go from version to version: wait for its end, or"),
        (["paused"], [served(A, 4)], "version 3: rollout-0 serves 4"),
        ([], [served(A, 3, "evaluation"), served(A, 4, "evaluation", replica="e-1")], "version 3: e-1 serves 4. "),
        (["paused"], [served(A, 3, ok=False), served(B, 3, "evaluation")], "no replica serves this run"),
    ],
)
def test_a_version_is_measured_only_where_a_replica_stays_with_it(
    said: list[str], replicas: list[m.PolicyApplied], way_out: str
) -> None:
    found = known(word("running"), *(word(state) for state in said), published(3, 3), published(4, 4), *replicas)
    run, serial = found.chosen(A, 3)
    assert found.served(run, serial) is not bool(way_out)
    assert "ETUDE_POOL=evaluation python -m services.inference" in found.unserved(run, serial)
    assert way_out in found.unserved(run, serial)


@contextlib.asynccontextmanager
async def evaluator(here: Folder, solved: dict[int, list[int]]) -> AsyncIterator[list[m.EvalRequested]]:
    """Answers with so many solved attempts of each problem, by version. Yields what it was asked."""
    objects, asked = stores.connect(ServiceSettings(state=here.state).objects_url), list[m.EvalRequested]()

    async def answer() -> None:
        async for delivery in here.bus.deliveries([t.EVALS_REQUESTED], "evaluator", 1):
            request: m.EvalRequested = delivery.message
            asked.append(request)
            rows = {f"p{i}": {"samples": request.samples, "solved": n} for i, n in enumerate(solved[request.serial])}
            share = sum(solved[request.serial]) / len(rows) / request.samples
            figures = {"pass_at_1": share, "pass_at_1_low": 0.0, "pass_at_1_high": 1.0, "first_edit": 0.25, "best_of_k": 0.5,
                       "k": float(request.samples), "problems": float(len(rows)), "samples": float(request.samples),
                       "infrastructure_errors": 0.0, "attempts": float(len(rows) * request.samples)}  # fmt: skip
            data = json.dumps({"serial": request.serial, "figures": figures, "problems": rows}).encode()
            report = objects.put(f"{evaluation_prefix(request.run, request.eval)}/{REPORT}", data)
            ended = m.EvalFinished(
                run=request.run, eval=request.eval, serial=request.serial, report=report, figures=figures
            )
            await here.say(t.EVALS_FINISHED, ended)
            delivery.done()

    answering = asyncio.create_task(answer())
    try:
        yield asked
    finally:
        answering.cancel()


async def start_with_held_out(here: Folder) -> None:
    objects = stores.connect(ServiceSettings(state=here.state).objects_url)
    pack = objects.put("pack.jsonl.zst", zstandard.compress(b"{}\n" * PROBLEMS))
    held_out = msgspec.structs.replace(config(), run=A, eval_pack=pack, eval_pack_hidden=pack)
    ref = objects.put(f"runs/{A}/config.json", msgspec.json.encode(held_out))
    await here.say(t.RUNS_STATE, status(A, "paused", ref))


def test_versions_are_measured_once_and_stand_beside_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with folder(tmp_path, scheduler=False) as here:
            await start_with_held_out(here)
            await here.publish(0)
            async with evaluator(here, {0: [0, 1, 2], 1: [1, 2, 2]}) as asked:
                for serial in (0, 1, 1):
                    await here.say(t.POLICIES_APPLIED, served(A, serial))
                    out = tmp_path / "figures.json"
                    done = await here.etude("measure", "--samples", "2", "--json", str(out))
                    assert done.exit_code == 0, done.output
                    if serial == 0:
                        assert json.loads(out.read_text())[0]["gain"] is None
                        await publish_weights(here, 1)
                assert [(one.eval, one.serial, one.problems, one.samples) for one in asked] == [
                    ("version-0-3x2", 0, 3, 2),
                    ("version-1-3x2", 1, 3, 2),
                ]
            rows = json.loads(out.read_text())
            assert [(row["version"], row["step"], row["figures"]["pass_at_1"]) for row in rows] == [
                (0, 0, 0.5),
                (1, 1, 5 / 6),
            ]
            assert rows[1]["gain"]["mean"] == pytest.approx(1 / 3)
            assert "50.0%" in done.stdout
            assert "+33.3 [" in done.stdout

    asyncio.run(scenario())


def test_several_versions_are_measured_in_one_go_and_the_best_is_chosen_without_measuring(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with folder(tmp_path, scheduler=False) as here:
            await start_with_held_out(here)
            for serial in range(5):
                await publish_weights(here, serial)
            gone = stores.connect(ServiceSettings(state=here.state).objects_url)
            for key in list(gone.list(f"{policy_prefix(A, 2)}/0")):
                gone.delete(key)
            await here.say(t.POLICIES_APPLIED, served(A, 0, "evaluation", on_request=True))
            solved = {0: [0, 0, 0], 1: [1, 1, 1], 3: [2, 2, 2], 4: [1, 1, 1]}
            async with evaluator(here, solved) as asked:
                nothing = await here.etude("measure", "--best")
                assert (nothing.exit_code, "found measured nothing" in nothing.output) == (1, True)
                done = await here.etude("measure", "--versions", "3, 1", "--samples", "2")
                assert done.exit_code == 0, done.output
                done = await here.etude("measure", "--every", "2", "--samples", "2")
                assert done.exit_code == 0, done.output
                assert [one.serial for one in asked] == [3, 1, 0, 4]  # nobody can build version 2
                deleted = await here.etude("measure", "--version", "2", "--samples", "2")
                assert (deleted.exit_code, "its weights are deleted" in " ".join(deleted.output.split())) == (1, True)
                both = await here.etude("measure", "--version", "2", "--best")
                assert (both.exit_code, "at most one of them" in " ".join(both.output.split())) == (2, True)
                assert len(asked) == 4
            out = tmp_path / "best.json"
            best = await here.etude("measure", "--best", "--json", str(out))
            assert best.exit_code == 0, best.output
            assert f"{A}: version 3, 100.0% [0.0%, 100.0%] of 3 × 2, is the best of 4" in best.stdout
            said = json.loads(out.read_text())
            assert (said["version"], said["step"], said["newest"], said["deleted"]) == (3, 3, 4, False)
            assert said["gains"]["4"]["mean"] == pytest.approx(0.5)

            async with here.trainer(lambda: here.publish(3, incarnation=1, first=5)):
                back = await here.etude("rollback", "--to", "best")
            assert (back.exit_code, "version 3 (step 3)" in back.stdout) == (0, True), back.output
            odd = await here.etude("rollback", "--to", "newest")
            assert (odd.exit_code, "found 'newest'; allowed: a number, or best" in odd.output) == (1, True)

    asyncio.run(scenario())


async def publish_weights(here: Folder, serial: int) -> None:
    objects = stores.connect(ServiceSettings(state=here.state).objects_url)
    ref = weights.publish(objects, A, serial, 0, serial, None, {"w": np.full(4, serial, np.float32)})
    await here.say(t.POLICIES_PUBLISHED, msgspec.structs.replace(published(serial, serial), manifest=ref))


def test_where_no_engine_serves_the_version_nothing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "SERVED_WITHIN_S", 0.5)

    async def scenario() -> None:
        async with folder(tmp_path, scheduler=False) as here, evaluator(here, {}) as asked:
            await start_with_held_out(here)
            done = await here.etude("measure")
            assert (done.exit_code, "no replica serves this run" in " ".join(done.output.split())) == (1, True)
            assert asked == []

    asyncio.run(scenario())


def test_a_run_without_held_out_problems_is_told_as_such(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with folder(tmp_path, scheduler=False) as here:
            await here.start(A)
            done = await here.etude("measure")
            assert (done.exit_code, "without held-out problems" in " ".join(done.output.split())) == (1, True)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("solved", "words", "told"),
    [
        ({1: [2, 2, 2], 2: [2, 1, 0]}, [], "version 1 beside version 2: +50.0 points ["),
        ({1: [2, 1, 0], 2: [2, 1, 1]}, ["--within", "20"], "version 1 beside version 2: -16.7 points ["),
        ({1: [2, 1, 0], 2: [2, 2, 2]}, [], ""),
    ],
)
def test_with_a_canary_all_go_back_only_where_the_version_is_measured_to_be_no_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solved: dict[int, list[int]], words: list[str], told: str
) -> None:
    monkeypatch.setattr(measuring, "SERVED_WITHIN_S", 2.0)

    async def scenario() -> None:
        async with folder(tmp_path, scheduler=False) as here, evaluator(here, solved) as asked:
            await start_with_held_out(here)
            for serial in range(3):
                await publish_weights(here, serial)
            await here.say(t.POLICIES_APPLIED, served(A, 2))

            back = ["rollback", "--to", "1", "--canary", "--samples", "2", "--reason", "it fell", *words]
            alone = await here.etude(*back)  # the engine that serves all stays with version 2
            assert (alone.exit_code, "start an engine for evaluations" in " ".join(alone.stderr.split())) == (1, True)

            await here.say(t.POLICIES_APPLIED, served(A, 0, "evaluation", on_request=True))
            async with here.trainer(lambda: here.publish(1, incarnation=1, first=3)):
                done = await here.etude(*back)
            assert [request.serial for request in asked] == [2, 1]
            rollbacks = [word for word in await here.said() if word.action == "rollback"]
            if told:
                assert (done.exit_code, "goes on from there: version 3." in done.stderr) == (0, True), done.output
                assert [word.reason.startswith(f"it fell; {told}") for word in rollbacks] == [True]
            else:
                assert (done.exit_code, "Nobody was told to go back" in done.stderr) == (1, True), done.output
                assert rollbacks == []

    asyncio.run(scenario())
