"""The inference service with SGLang as its engine, over a stand-in for the server (tests/integration/fake_sglang.py). The
real one: test_sglang.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import aiohttp
import psutil
import pytest

from shared.contracts.messages import PolicyPromoted
from shared.contracts.topics import POLICIES_PROMOTED
from shared.weights import read_manifest
from tests.integration.engine_platform import RUN, Platform, ask, body_of, start_process
from tests.integration.sglang_world import World, quick, world, wrapper
from tests.patience import eventually, patient, until

__all__ = ["quick", "world"]


def test_a_started_run_is_served_and_followed_and_the_live_weights_equal_the_manifest(world):
    async def test(w: World) -> None:
        p = w.p
        p.write_version(0, None)
        await p.start_run()
        async with w.replica() as replica:
            url = replica.health.url
            assert (await ask(url, "/generate", body_of([1, 2])))[0] == 503
            await p.applied(0)
            for serial in (1, 2, 3):
                p.write_version(serial, serial - 1)
                await p.announce(serial, serial - 1)
            message, _ = await p.applied(3)
            assert message.url == url
            assert 0 < message.pause_s < 30
            status, checked = await ask(url, "/weights_checker", {"action": "checksum"})
            assert (status, checked["serial"]) == (200, 3)
            assert checked["checksum"] == read_manifest(p.objects, p.versions[3].manifest).checksum
            body = body_of(list(range(20)), 4, return_routed_experts=True, routed_experts_start_len=5, rid="x")
            _, answer = await ask(url, "/generate", body)
            meta = answer["meta_info"]
            assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 4}]
            assert (meta["id"], meta["extra_key"]) == ("x", "@3")
            assert (meta["oldest_kv_version"], meta["completion_tokens"]) == (3, 4)
            asked = (await w.server(replica))["asked"][-1]
            assert (asked["extra_key"].rpartition("/")[2], asked["rid"]) == ("@3", "1:x")
            folders = sorted((p.state / "sglang" / "replica" / "1").iterdir())
            assert [folder.name for folder in folders] == ["3"]  # what served before is gone
        assert not (await w.p.applied(3, ok=False))[0].ok

    world(test)


@pytest.mark.parametrize("name", ["replica", ""])
def test_a_replica_that_ends_leaves_no_version_behind_and_two_without_a_name_share_no_folder(world, name):
    async def test(w: World) -> None:
        await w.p.start_run()
        async with w.replica(name=name) as one, w.replica(name=name and "other") as two:
            for replica in (one, two):
                await eventually(lambda replica=replica: replica.agent.live is not None)
            folders = [replica.agent.live.served.folder for replica in (one, two)]
            assert folders[0] != folders[1]
            assert all((folder / "config.json").exists() for folder in folders)
        left = [path for path in (w.p.state / "sglang").rglob("*") if path.suffix != ".lock"]
        assert left == []

    world(test)


def test_a_swap_in_mid_generation_shows_in_the_version_spans(world):
    async def test(w: World) -> None:
        w.p.write_version(0, None)
        await w.p.start_run()
        async with w.replica() as replica:
            await w.p.applied(0)
            body = body_of(list(range(8)), 50, extra_key="0", rid="long")
            generating = asyncio.create_task(ask(replica.health.url, "/generate", body))
            await asyncio.sleep(0.1)
            w.p.write_version(1, 0)
            await w.p.announce(1, 0)
            spans: list[dict[str, Any]] = []
            while len(spans) < 2:
                status, answer = await generating
                assert status == 200
                spans = answer["meta_info"]["weight_versions"]
                if len(spans) < 2:  # the machine was slow to load: the next one meets the swap
                    generating = asyncio.create_task(ask(replica.health.url, "/generate", {**body, "rid": None}))
            assert [s["version"] for s in spans] == ["0", "1"]
            assert spans[-1]["end"] == 50
            assert answer["meta_info"]["oldest_kv_version"] == 0

    world(test)


@pytest.mark.parametrize("flushes", [False, True])
def test_a_swap_keeps_the_cache_unless_it_is_to_be_flushed(world, flushes):
    async def test(w: World) -> None:
        w.p.write_version(0, None)
        await w.p.start_run()
        async with w.replica(flush_on_swap=flushes) as replica:
            await w.p.applied(0)
            generating = asyncio.create_task(ask(replica.health.url, "/generate", body_of([1, 2], 60, extra_key="0")))
            w.wrong(refuse=["1"])  # what served before is loaded again, and flushed again
            w.p.write_version(1, 0)
            await w.p.announce(1, 0)
            await w.refused(replica)
            w.wrong()
            await w.p.applied(1)
            status, answer = await generating
            assert (status, len(answer["output_ids"])) == (200, 60)
            again = await ask(replica.health.url, "/generate", body_of([1, 2], 2, extra_key="0"))
            assert again[1]["meta_info"]["oldest_kv_version"] == (1 if flushes else 0)
            assert bool((await w.server(replica))["flushes"]) is flushes

    world(test)


def test_a_stop_in_the_middle_of_a_swap_lets_running_requests_end(world):
    async def test(w: World) -> None:
        w.p.write_version(0, None)
        await w.p.start_run()
        w.wrong(slow=1.0)
        async with w.replica(drain_s=30.0) as replica:
            await w.p.applied(0)
            generating = asyncio.create_task(ask(replica.health.url, "/generate", body_of([1, 2], 50)))
            await eventually(lambda: not replica.engine.server.idle.is_set())
            w.p.write_version(1, 0)
            await w.p.announce(1, 0)
            await eventually(lambda: replica.engine.server.keeper.paused)
        status, answer = await generating
        assert status == 200
        assert len(answer["output_ids"]) == 50

    world(test)


def test_a_server_is_not_continued_from_outside_before_its_new_weights_were_verified(world):
    async def test(w: World) -> None:
        w.p.write_version(0, None)
        await w.p.start_run()
        w.wrong(slow=1.5)
        async with w.replica() as replica:
            await w.p.applied(0)
            url = replica.health.url
            w.p.write_version(1, 0)
            await w.p.announce(1, 0)
            await eventually(lambda: replica.server.keeper.paused)
            status, _ = await ask(url, "/continue_generation", {})
            assert status == 200
            assert replica.agent.live.serial == 1  # nobody says so of a version before it was verified

    world(test)


@pytest.mark.parametrize("damage", [{}, {"refuse": ["1"]}])
def test_a_paused_server_stays_paused_over_a_swap(world, damage):
    async def test(w: World) -> None:
        w.p.write_version(0, None)
        await w.p.start_run()
        w.wrong(**damage)
        async with w.replica() as replica:
            await w.p.applied(0)
            url = replica.health.url
            assert (await ask(url, "/pause_generation", {"mode": "in_place"}))[0] == 200
            w.p.write_version(1, 0)
            await w.p.announce(1, 0)
            await w.p.applied(1, ok=not damage)
            assert not (await w.server(replica))["going"]
            assert (await ask(url, "/server_info"))[1]["paused"]
            assert (await ask(url, "/continue_generation", {}))[0] == 200
            status, _ = await ask(url, "/generate", body_of([1, 2], 3))
            assert status == 200

    world(test)


@pytest.mark.parametrize("damage", [{"flip": "1"}, {"refuse": ["1"]}])
def test_a_load_that_fails_is_undone_and_the_third_takes_the_replica_out_until_a_version_loads(world, damage):
    async def test(w: World) -> None:
        p = w.p
        p.write_version(0, None)
        await p.start_run()
        async with w.replica() as replica:
            await p.applied(0)
            p.write_version(1, 0)
            w.wrong(**damage)
            await p.announce(1, 0)
            message, seen = await p.applied(1, ok=False)
            said = {"flip": "model.norm.weight", "refuse": "out of memory"}
            assert said[next(iter(damage))] in message.reason
            assert (await ask(replica.health.url, "/readyz"))[0] == 503
            assert replica.agent.live is not None
            assert replica.agent.live.serial == 0

            async def answers() -> bool:
                return (await ask(replica.health.url, "/weights_checker", {}))[0] == 200

            await eventually(answers, seconds=60)  # what it had goes on, bit for bit
            assert (await ask(replica.health.url, "/weights_checker", {}))[1]["serial"] == 0
            w.wrong()
            p.write_version(2, None)
            await p.announce(2)
            await p.applied(2, after=seen)
            await w.ready(replica)

    world(test)


def test_a_server_that_dies_of_a_version_comes_back_with_the_one_before(world):
    async def test(w: World) -> None:
        p = w.p
        p.write_version(0, None)
        await p.start_run()
        async with w.replica() as replica:
            await p.applied(0)
            p.write_version(1, 0)
            w.wrong(die="1")
            await p.announce(1, 0)
            await eventually(lambda: replica.server.keeper.starts == 2)
            w.wrong()
            await p.applied(1)
            await w.ready(replica)
            assert (await w.server(replica))["weight_version"] == "0"  # what it was started with

    world(test)


def test_where_the_way_back_fails_too_a_new_process_serves_what_was_served(world):
    async def test(w: World) -> None:
        p = w.p
        p.write_version(0, None)
        await p.start_run()
        async with w.replica() as replica:
            await p.applied(0)
            before = (await w.server(replica))["pid"]
            p.write_version(1, 0)
            w.wrong(refuse=["0", "1"])
            await p.announce(1, 0)
            await eventually(lambda: not psutil.pid_exists(before))
            w.wrong()
            await p.applied(1)
            after = await w.server(replica)
            assert after["pid"] != before
            assert after["weight_version"] == "0"  # what it was started with; 1 came after
            status, checked = await ask(replica.health.url, "/weights_checker", {})
            assert (status, checked["serial"]) == (200, 1)

    world(test)


def test_a_server_that_is_killed_comes_back_with_the_version_that_it_served(world):
    async def test(w: World) -> None:
        p = w.p
        p.write_version(0, None)
        p.write_version(1, 0)
        await p.announce(1, 0)
        await p.start_run()
        async with w.replica() as replica:
            await p.applied(1)
            url = replica.health.url
            lost = asyncio.create_task(ask(url, "/generate", body_of([1, 2], 60)))
            await w.asked(replica, 1)
            pid = (await w.server(replica))["pid"]
            os.kill(pid, signal.SIGKILL)
            assert (await lost)[0] == 503  # "not now": the client asks again
            await eventually(lambda: replica.server.keeper.starts == 2)
            await w.ready(replica)
            assert (await ask(url, "/health"))[0] == 200
            _, answer = await ask(url, "/generate", body_of([1, 2], 3))
            assert answer["meta_info"]["weight_version"] == "1"

    world(test)


def test_what_keeps_the_server_from_starting_is_said_and_tried_again(world):
    async def test(w: World) -> None:
        await w.p.start_run()
        w.wrong(exit="ValueError: not enough memory for the cache")
        async with w.replica() as replica:
            await w.waits(replica, "ended with exit code 1 while it started: ValueError: not enough memory")
            assert (await ask(replica.health.url, "/healthz"))[0] == 200
            w.wrong()
            await w.p.applied(0)
            await w.ready(replica)

    world(test)


def test_a_server_that_never_answers_is_started_again_after_the_limit(world):
    async def test(w: World) -> None:
        await w.p.start_run()
        w.wrong(deaf=True)
        async with w.replica(sglang_start_s=3.0) as replica:
            await w.waits(replica, "did not answer within sglang_start_s 3 s")
            w.wrong()
            replica.engine._keeper.start_s = 60.0
            await w.p.applied(0)

    world(test)


def test_a_server_that_answers_no_health_check_serves_nothing_until_it_does(world):
    async def test(w: World) -> None:
        await w.p.start_run()
        async with w.replica() as replica:
            await w.p.applied(0)
            w.wrong(deaf=True)
            await w.waits(replica, "an answer to its health check")
            assert (await ask(replica.health.url, "/health"))[0] == 503
            assert (await ask(replica.health.url, "/generate", body_of([1, 2])))[0] == 503
            w.wrong()
            await w.ready(replica)
            assert replica.server.keeper.starts == 1

    world(test)


def test_a_client_that_goes_away_ends_its_request_in_the_server(world):
    async def test(w: World) -> None:
        await w.p.start_run()
        async with w.replica() as replica:
            await w.p.applied(0)
            asked = len((await w.server(replica))["asked"])
            leaving = asyncio.create_task(ask(replica.health.url, "/generate", body_of([1, 2, 3], 60, rid="gone")))
            await w.asked(replica, asked + 1)
            leaving.cancel()
            await eventually(replica.server.idle.is_set)
            _, answer = await ask(replica.health.url, "/generate", body_of([1, 2, 3], 3, rid="gone"))
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"  # the stand-in remembers aborted ids

    world(test)


def test_bad_input_is_refused_before_the_server_sees_it(world):
    async def test(w: World) -> None:
        await w.p.start_run()
        async with w.replica() as replica:
            await w.p.applied(0)
            for change, said in {
                "input_ids": ([1, 64], "0..63"),
                "sampling_params": ({"top_p": 0.5}, "top_p"),
                "stream": ("yes", "stream"),
            }.items():
                status, answer = await ask(replica.health.url, "/generate", {**body_of([1]), change: said[0]})
                assert status == 400
                assert said[1] in answer["error"]["message"]
            assert not (await w.server(replica))["asked"]

    world(test)


def test_the_servers_metrics_stand_among_ours(world):
    async def test(w: World) -> None:
        await w.p.start_run()
        async with w.replica() as replica:
            await w.p.applied(0)
            async with asyncio.timeout(patient(60)), aiohttp.ClientSession() as session:
                text = ""
                while "sglang:num_running_reqs 3.0" not in text:
                    async with session.get(f"{replica.health.url}/metrics") as response:
                        text = await response.text()
            assert "etude_inference_sglang_up 1.0" in text
            assert "etude_inference_swap_pause_seconds_count" in text

    world(test)


def test_a_server_that_we_did_not_start_is_checked_loaded_and_followed(world):
    async def test(w: World) -> None:
        p = w.p
        p.write_version(0, None)
        await p.start_run()
        async with w.replica(name="starts", pool="evaluation") as first:
            await p.applied(0)
            url = (await ask(first.health.url, "/server_info"))[1]["url"]
            w.wrong(info={"tp_size": 2})
            async with w.replica(name="attaches", sglang_url=url) as replica:
                await w.waits(replica, "--tp-size: found 2; allowed: 1")
                w.wrong()
                p.write_version(1, 0)
                await p.announce(1, 0)
                message, _ = await p.applied(1)
                assert message.replica == "attaches"
                assert (await ask(replica.health.url, "/weights_checker", {}))[1]["serial"] == 1
            assert psutil.pid_exists((await ask(url, "/server_info"))[1]["pid"])  # it is not ours to end

    world(test)


def test_no_run_finds_the_cache_entries_of_another_in_a_server_that_stays(world):
    async def test(w: World) -> None:
        await w.p.start_run("r-first")
        async with w.replica(name="starts", run="r-first") as first:
            await w.p.applied(0)
            url = (await ask(first.health.url, "/server_info"))[1]["url"]
            async with w.replica(name="attaches", sglang_url=url) as replica:

                async def keys(run: str) -> list[str]:
                    await eventually(lambda: replica.agent.run_id == run and replica.server.live is not None)
                    for rid in ("x", "y"):
                        body = body_of([1, 2, 3], 2, extra_key="0", rid=f"{run}-{rid}")
                        status, answer = await ask(replica.health.url, "/generate", body)
                        assert (status, answer["meta_info"]["oldest_kv_version"]) == (200, 0)
                    return [asked["extra_key"] for asked in (await ask(url, "/server_info"))[1]["asked"][-2:]]

                before = await keys("r-first")
                assert before[0] == before[1]
                await w.p.start_run("r-second")
                after = await keys("r-second")
                assert after[0] == after[1]
                assert before[0] != after[0]

    world(test)


def test_the_server_goes_on_until_what_another_run_promoted_was_found_to_be_there(world):
    async def test(w: World) -> None:
        async def promote(run: str, serial: int) -> None:
            await w.p.bus.publish(POLICIES_PROMOTED, run, PolicyPromoted(run=run, serial=serial, by="test"))

        w.p.write_version(0, None)
        w.p.write_version(1, 0)
        await w.p.start_run()
        await w.p.start_run("r-first")
        async with w.replica(pool="serving") as replica:
            await promote("r-first", 0)
            _, seen = await w.p.applied(0)
            before = (await w.server(replica))["pid"]
            await promote(RUN, 2)
            message, seen = await w.p.applied(2, ok=False, after=seen)
            assert (message.run, message.reason) == (RUN, f"version 2 of run {RUN}: it is not there")
            await w.ready(replica)
            assert (await w.server(replica))["pid"] == before
            assert (await ask(replica.health.url, "/generate", body_of([1, 2], 2)))[0] == 200
            await promote(RUN, 1)
            message, _ = await w.p.applied(1, after=seen)
            assert message.run == RUN
            await w.ready(replica)
            assert not psutil.pid_exists(before)

    world(test)


def test_the_server_ends_with_the_service_whatever_ends_it(tmp_path, monkeypatch):
    platform = Platform(tmp_path)
    knobs = tmp_path / "knobs.json"
    monkeypatch.setenv("FAKE_SGLANG", str(knobs))

    def started() -> tuple[subprocess.Popen[bytes], int]:
        process, url = start_process(
            platform,
            ETUDE_ENGINE="sglang",
            ETUDE_CHECKPOINT=str(platform.base),
            ETUDE_SGLANG_PYTHON=wrapper(tmp_path),
            ETUDE_SGLANG_DEVICE="cpu",
            ETUDE_SGLANG_DTYPE="float32",
        )
        server = asyncio.run(ask(url, "/server_info"))[1]["url"]
        return process, asyncio.run(ask(server, "/server_info"))[1]["pid"]

    process, pid = started()
    process.kill()
    process.wait()
    until(lambda: not alive(pid), "the server to end")
    process, pid = started()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=patient(60)) == 0
    assert not alive(pid)


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_settings_that_cannot_go_together_end_the_service_with_words_not_a_trace(tmp_path):
    platform = Platform(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "services.inference"],
        env={
            **os.environ,
            "ETUDE_STATE": str(tmp_path),
            "ETUDE_ENGINE": "sglang",
            "ETUDE_CHECKPOINT": str(platform.base),
            "ETUDE_SGLANG_TP": "3",
        },
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert ended.returncode == 1
    assert "sglang_tp: found 3; allowed: a divisor of the model's 4 attention heads" in ended.stderr
    assert "Traceback" not in ended.stderr
