"""What keeps a replica from the version or run that it should serve, and what goes on meanwhile: a store that is away, tensors
that are not what they were, a run too large for this machine, a pin that cannot be had."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from services.inference import swap_metrics
from services.inference.candidates import FAILURES_TOLERATED
from shared.contracts.ids import policy_prefix
from shared.contracts.topics import RUNS_STATE
from shared.weights import read_manifest
from tests.integration.engine_platform import RUN, Platform, Store, another_base, ask, body_of, run, waits
from tests.patience import eventually, patient
from tests.ruling import status


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("services.inference.candidates.FIRST_DELAY_S", 0.05)


def failed() -> float:
    return swap_metrics.SWAP_FAILURES._value.get()


async def serves(p: Platform, url: str, serial: int) -> None:
    checked = (await ask(url, "/weights_checker", {}))[1]
    assert checked["serial"] == serial
    assert checked["checksum"] == read_manifest(p.objects, p.versions[serial].manifest).checksum


def test_while_the_store_is_away_what_serves_goes_on_and_then_the_delta_alone_is_fetched(tmp_path):
    async def test(p: Platform) -> None:
        store, before = Store(p.objects), failed()
        p.write_version(0, None)
        p.write_version(1, 0)
        await p.announce(1, 0)
        await p.start_run()
        async with p.replica(objects=store) as replica:
            url = replica.health.url
            _, seen = await p.applied(1)
            p.write_version(2, 1)
            store.away = True
            await p.announce(2, 1)
            await eventually(lambda: store.refused > FAILURES_TOLERATED)
            assert await waits(url) == ["objects"]
            assert (await ask(url, "/generate", body_of([1, 2], 2)))[0] == 200
            store.fetched.clear()
            store.away = False
            _, now = await p.applied(2, after=seen)
            assert now == seen + 1  # nobody was told that it failed
            assert failed() == before
            assert store.payloads() == [f"{policy_prefix(RUN, 2)}/0000-0000.bin"]
            assert (await ask(url, "/readyz"))[0] == 200
            await serves(p, url, 2)

    run(test, tmp_path)


def test_a_run_that_starts_while_the_store_is_away_is_taken_up_when_it_is_back(tmp_path):
    async def test(p: Platform) -> None:
        store = Store(p.objects)
        await p.start_run("r-first")
        async with p.replica(objects=store) as replica:
            await p.applied(0)
            store.away = True
            await p.start_run()
            await eventually(lambda: store.refused > FAILURES_TOLERATED)
            assert (await ask(replica.health.url, "/readyz"))[0] == 200
            assert (await ask(replica.health.url, "/generate", body_of([1, 2], 2)))[0] == 200
            store.away = False
            await eventually(lambda: replica.agent.run_id == RUN)

    run(test, tmp_path)


def test_a_replica_whose_own_tensors_are_not_what_they_were_begins_anew_from_the_full_base(tmp_path):
    async def test(p: Platform) -> None:
        store = Store(p.objects)
        p.write_version(0, None)
        p.write_version(1, 0)
        await p.announce(1, 0)
        await p.start_run()
        async with p.replica(objects=store) as replica:
            _, seen = await p.applied(1)
            name, held = next(iter(replica.agent.live.bits.items()))
            flipped = held.copy()
            flipped.reshape(-1)[0] ^= 1
            replica.agent.live.bits[name] = flipped
            store.fetched.clear()
            p.write_version(2, 1)
            await p.announce(2, 1)
            _, now = await p.applied(2, after=seen)
            assert now == seen + 1
            assert f"{policy_prefix(RUN, 0)}/0000-0000.bin" in store.payloads()
            await serves(p, replica.health.url, 2)

    run(test, tmp_path)


def test_a_run_whose_cache_this_machine_has_no_room_for_takes_no_replica_from_one_that_can_be_served(tmp_path):
    async def test(p: Platform) -> None:
        await p.start_run()
        async with p.replica() as replica:
            await p.applied(0)
            engine = replica.server.engine
            await p.start_run("r-large", another_base(tmp_path / "large", context=10**9))
            unread = replica.agent.candidates.unread
            await eventually(lambda: "r-large" in unread and unread["r-large"].failures > FAILURES_TOLERATED)
            assert "cache_rows: found 8 rows of 1000000000 positions" in unread["r-large"].what
            assert (await ask(replica.health.url, "/readyz"))[0] == 200
            assert (await ask(replica.health.url, "/generate", body_of([1, 2], 2)))[0] == 200
            assert (replica.agent.run_id, replica.server.engine is engine) == (RUN, True)

    run(test, tmp_path)


def test_a_checkpoint_whose_cache_this_machine_has_no_room_for_ends_the_process_with_words_not_a_trace(tmp_path):
    platform = Platform(tmp_path)
    env = {
        **os.environ,
        "ETUDE_STATE": str(tmp_path),
        "ETUDE_CHECKPOINT": str(platform.base),
        "ETUDE_CONTEXT": str(10**9),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "services.inference"], env=env, capture_output=True, text=True, timeout=patient(180)
    )
    assert done.returncode
    assert "cache_rows: found 160 rows of 1000000000 positions (context)" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_a_pin_holds_over_new_versions_and_new_runs_until_it_is_let_go(tmp_path):
    async def test(p: Platform) -> None:
        for serial in range(2):
            p.write_version(serial, serial - 1 if serial else None)
            await p.announce(serial, serial - 1)
        await p.start_run()
        async with p.replica() as replica:
            url = replica.health.url
            _, seen = await p.applied(1)
            assert (await ask(url, "/pin", {"serial": -2}))[0] == 400
            assert await ask(url, "/pin", {"serial": 0}) == (200, {"serial": 0, "run": RUN})
            _, seen = await p.applied(0, after=seen)
            p.write_version(2, 1)
            await p.announce(2, 1)
            await p.start_run("r-later")
            await eventually(lambda: "r-later" in replica.agent.following.started)
            assert (await ask(url, "/pin", {"serial": 0}))[0] == 200  # it was looked at
            assert (await ask(url, "/readyz"))[0] == 200
            await serves(p, url, 0)
            assert await ask(url, "/pin", {"serial": -1}) == (200, {"serial": -1, "run": RUN})
            await eventually(lambda: replica.agent.shown.run == "r-later")
            await p.bus.publish(RUNS_STATE, "r-later", status("r-later", "finished"))
            await p.applied(2, after=seen)

    run(test, tmp_path)


def test_a_pin_that_cannot_be_served_is_refused_with_the_reason_and_what_was_followed_is_followed_again(tmp_path):
    async def test(p: Platform) -> None:
        for serial in range(3):
            p.write_version(serial, serial - 1 if serial else None)
            await p.announce(serial, serial - 1)
        p.objects.delete(f"{policy_prefix(RUN, 1)}/0000-0000.bin")
        p.write_version(3, None)
        await p.announce(3)
        await p.start_run()
        async with p.replica() as replica:
            url = replica.health.url
            _, seen = await p.applied(3)
            status, answer = await ask(url, "/pin", {"serial": 2})
            assert status == 400
            assert "version 2" in answer["error"]["message"]
            assert "serial 1: payload" in answer["error"]["message"]
            assert (await ask(url, "/readyz"))[0] == 200
            await serves(p, url, 3)
            p.write_version(4, 3)
            await p.announce(4, 3)
            await p.applied(4, after=seen)

    run(test, tmp_path)


def test_a_pin_while_the_store_is_away_is_answered_that_nobody_can_say(tmp_path):
    async def test(p: Platform) -> None:
        store = Store(p.objects)
        for serial in range(2):
            p.write_version(serial, serial - 1 if serial else None)
            await p.announce(serial, serial - 1)
        await p.start_run()
        async with p.replica(objects=store) as replica:
            url = replica.health.url
            await p.applied(1)
            store.away = True
            assert (await ask(url, "/pin", {"serial": 1}))[0] == 503
            pinning = asyncio.create_task(ask(url, "/pin", {"serial": 0}))  # which is there whatever the store says
            assert (await pinning)[0] == 503
            assert (await ask(url, "/generate", body_of([1, 2], 2)))[0] == 200
            store.away = False
            assert (await ask(url, "/pin", {"serial": 0}))[0] == 200
            await serves(p, url, 0)

    run(test, tmp_path)


def spoil(p: Platform, serial: int, how: str) -> None:
    """Damage what is published of a version, for good."""
    prefix = policy_prefix(RUN, serial)
    key = f"{prefix}/manifest.json" if how == "manifest" else f"{prefix}/0000-0000.bin"
    data = p.objects.get(p.objects.head(key))
    p.objects.delete(key)
    if how == "flipped":
        p.objects.put(key, data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("how", ["flipped", "payload", "manifest"])
def test_a_version_that_is_damaged_or_lost_is_reported_with_the_one_that_still_answers(tmp_path, how):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        p.write_version(1, 0)
        await p.announce(1, 0)
        await p.start_run()
        async with p.replica() as replica:
            url = replica.health.url
            _, seen = await p.applied(1)
            p.write_version(2, 1)
            spoil(p, 2, how)
            await p.announce(2, 1)
            message, seen = await p.applied(2, ok=False, after=seen)
            assert (message.damaged, message.serving) == (True, 1)
            (why,) = await waits(url)
            assert "version 2 cannot be loaded" in why
            assert message.reason in why
            _, answer = await ask(url, "/generate", body_of([1, 2], 2))
            assert answer["meta_info"]["weight_version"] == "1"
            if how != "manifest":  # else nothing can be a delta of it
                p.write_version(3, 2)
                await p.announce(3, 2)
                message, seen = await p.applied(3, ok=False, after=seen)
                assert (message.damaged, message.serving) == (True, 1)
            p.write_version(4, None)
            await p.announce(4)
            await p.applied(4, after=seen)
            assert (await ask(url, "/readyz"))[0] == 200
            await serves(p, url, 4)

    run(test, tmp_path)


def test_one_that_has_served_nothing_yet_holds_nothing(tmp_path):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        p.write_version(1, 0)
        spoil(p, 1, "flipped")
        await p.announce(1, 0)
        await p.start_run()
        async with p.replica():
            message, _ = await p.applied(1, ok=False)
            assert (message.damaged, message.serving) == (True, -1)

    run(test, tmp_path)


def test_the_base_that_mends_it_is_taken_when_it_is_published_however_long_the_replica_would_rest(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("services.inference.weights_agent.delay_after", lambda failures: 0.01 if failures < 4 else 600)

    async def test(p: Platform) -> None:
        p.write_version(0, None)
        await p.start_run()
        async with p.replica() as replica:
            (_, seen), before = await p.applied(0), failed()
            p.write_version(1, None)
            spoil(p, 1, "payload")
            await p.announce(1)
            await p.applied(1, ok=False, after=seen)
            await eventually(lambda: failed() > before + FAILURES_TOLERATED)
            p.write_version(2, None)
            await p.announce(2)
            await p.applied(2, after=seen + 1)
            await serves(p, replica.health.url, 2)

    run(test, tmp_path)
