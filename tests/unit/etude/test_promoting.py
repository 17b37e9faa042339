"""`etude promote`: what is refused, what a canary asks for, and for whom it waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etude import measuring, promoting
from shared import objects as stores
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.ids import policy_prefix
from shared.settings import ServiceSettings
from tests.unit.etude.test_measuring import evaluator, publish_weights, served, start_with_held_out
from tests.unit.etude.test_run_commands import A, Folder, folder

PATIENCE_S = 5.0  # engines that follow have done so long before, on a busy machine too


@contextlib.asynccontextmanager
async def serving(here: Folder, *names: str, broken: str = "") -> AsyncIterator[list[m.PolicyPromoted]]:
    """Engines that serve version 0, then what is promoted; `broken` says that it cannot. Yields what was promoted."""
    heard: list[m.PolicyPromoted] = []

    def word(name: str, serial: int) -> m.PolicyApplied:
        ok = name != broken or not serial
        return served(A, serial, "serving", replica=name, url=f"http://{name}", ok=ok, reason="" if ok else "no room")

    for name in names:
        await here.say(t.POLICIES_APPLIED, word(name, 0))

    async def follow() -> None:
        async for delivery in here.bus.deliveries([t.POLICIES_PROMOTED], None, 8):
            heard.append(delivery.message)
            for name in names:
                await here.say(t.POLICIES_APPLIED, word(name, delivery.message.serial))
            delivery.done()

    following = asyncio.create_task(follow())
    try:
        yield heard
    finally:
        following.cancel()


async def start(here: Folder, versions: int = 3) -> None:
    await start_with_held_out(here)
    for serial in range(versions):
        await publish_weights(here, serial)


def test_it_returns_when_every_engine_that_serves_others_serves_the_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with folder(tmp_path, scheduler=False) as here:
            await start(here)
            assert "Nothing is promoted." in (await here.etude("promote")).stdout
            early = await here.etude("promote", "--version", "1")
            assert (early.exit_code, "ETUDE_POOL=serving python -m services.inference" in early.stderr) == (0, True)
            async with serving(here, "s-0", "s-1") as heard:
                done = await here.etude("promote", A, "--version", "2", "--reason", "release  one")
                assert (done.exit_code, "Served by s-0, s-1." in done.stderr) == (0, True), done.output
                assert [(one.run, one.serial, one.reason) for one in heard] == [(A, 1, ""), (A, 2, "release one")]
                assert heard[-1].by.endswith("etude promote")
            told = (await here.etude("promote")).stdout
            assert f"Version 2 of {A} is promoted (" in told
            assert "release one" in told
            assert f"s-1 serves version 2 of {A}." in told

    asyncio.run(scenario())


def test_an_engine_that_does_not_follow_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoting, "FOLLOW_WITHIN_S", PATIENCE_S)

    async def scenario() -> None:
        async with folder(tmp_path, scheduler=False) as here:
            await start(here)
            gone = served(A, 0, "serving", replica="s-9", url="http://s-9")
            await here.say(t.POLICIES_APPLIED, gone)
            async with serving(here, "s-0", "s-1", broken="s-1"):
                done = await here.etude("promote", "--version", "1")
            said = " ".join(done.stderr.split())
            assert done.exit_code == 1
            assert "s-1: no room; s-9: serves version 0" in said
            assert "s-0" not in said

    asyncio.run(scenario())


def test_an_engine_that_failed_before_is_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promoting, "FOLLOW_WITHIN_S", PATIENCE_S)

    async def scenario() -> None:
        async with folder(tmp_path, scheduler=False) as here:
            await start(here)
            async with serving(here, "s-0", broken="s-0"):
                for _ in range(2):
                    done = await here.etude("promote", "--version", "1")
                    assert (done.exit_code, "s-0: no room" in " ".join(done.stderr.split())) == (1, True), done.output
                left = served(A, 0, "serving", replica="s-1", url="http://s-1", ok=False, reason=m.SHUTTING_DOWN)
                await here.say(t.POLICIES_APPLIED, left)  # nobody waits for it
                back = await here.etude("promote", "--version", "0")
                assert (back.exit_code, "Served by s-0." in back.stderr) == (0, True), back.output
            again = await here.etude("promote", "--version", "0")
            assert "Served by s-0." in again.stderr  # its last word fits

    asyncio.run(scenario())


def test_what_was_never_published_or_is_deleted_is_not_promoted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with folder(tmp_path, scheduler=False) as here, serving(here) as heard:
            await start(here)
            objects = stores.connect(ServiceSettings(state=here.state).objects_url)
            for key in list(objects.list(f"{policy_prefix(A, 1)}/0")):
                objects.delete(key)
            for version, why in (
                ("9", "has published versions 0 to 2"),
                ("1", "its weights are deleted"),
                ("best", "found measured nothing"),
                ("x", "found 'x'; allowed: a number, or best"),
            ):
                done = await here.etude("promote", "--version", version)
                assert (done.exit_code, why in " ".join(done.stderr.split())) == (1, True), done.output
            assert heard == []

    asyncio.run(scenario())


def test_with_a_canary_only_a_version_that_is_measured_to_be_no_loss_is_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "SERVED_WITHIN_S", 2.0)

    async def scenario() -> None:
        async with (
            folder(tmp_path, scheduler=False) as here,
            evaluator(here, {0: [0, 1, 0], 1: [1, 1, 1], 2: [1, 0, 0]}) as asked,
            serving(here, "s-0") as heard,
        ):
            await start(here)
            canary = ["promote", "--canary", "--samples", "2", "--version"]
            alone = await here.etude(
                *canary, "1"
            )  # no engine of the evaluation pool: those that serve others measure nothing
            assert (alone.exit_code, "start an engine for evaluations" in " ".join(alone.stderr.split())) == (1, True)

            await here.say(t.POLICIES_APPLIED, served(A, 0, "evaluation", on_request=True))
            first = await here.etude(*canary, "1")
            assert first.exit_code == 0, first.output
            worse = await here.etude(*canary, "2")
            assert (worse.exit_code, "Nothing is promoted" in " ".join(worse.stderr.split())) == (1, True)
            borne = await here.etude(*canary, "2", "--within", "40")
            assert borne.exit_code == 0, borne.output
            assert [request.serial for request in asked] == [0, 1, 2]  # beside the base, then beside what was promoted
            assert [one.serial for one in heard] == [1, 2]
            assert "version 2 beside version 1: -33.3 points [" in heard[-1].reason

    asyncio.run(scenario())
