"""The inference service as others see it: HTTP, bus and object store, over the embedded adapters."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from services.inference.candidates import FAILURES_TOLERATED
from shared.contracts.ids import policy_prefix
from shared.contracts.messages import EvalFinished, EvalRequested, PolicyPromoted
from shared.contracts.run import Ref
from shared.contracts.topics import EVALS_FINISHED, EVALS_REQUESTED, POLICIES_PROMOTED, RUNS_STATE
from shared.model import causal_rows
from shared.weights import read_manifest
from tests.integration.engine_platform import (
    RUN,
    Platform,
    ask,
    body_of,
    expected_logprobs,
    run,
    start_process,
)
from tests.patience import eventually, patient
from tests.ruling import status


def test_a_started_run_is_served_and_followed_and_the_live_weights_equal_the_manifest(tmp_path):
    async def test(p: Platform) -> None:
        async with p.replica() as replica:
            url = replica.health.url
            assert (await ask(url, "/readyz"))[0] == 503
            assert (await ask(url, "/generate", body_of([1, 2])))[0:1] == (503,)
            p.write_version(0, None)
            await p.start_run()
            await p.applied(0)
            assert (await ask(url, "/readyz"))[0] == 200
            for serial in (1, 2, 3):
                p.write_version(serial, serial - 1)
                await p.announce(serial, serial - 1)
            message, _ = await p.applied(3)
            assert message.url == url
            assert message.pause_s >= 0
            status, checked = await ask(url, "/weights_checker", {"action": "checksum"})
            assert status == 200
            assert checked["serial"] == 3
            assert checked["checksum"] == read_manifest(p.objects, p.versions[3].manifest).checksum
            prompt = list(range(20))
            body = body_of(prompt, 8, return_routed_experts=True, routed_experts_start_len=5, rid="x")
            _, answer = await ask(url, "/generate", body)
            meta = answer["meta_info"]
            lp = np.array([p for p, _, _ in meta["output_token_logprobs"]])
            np.testing.assert_allclose(lp, expected_logprobs(p.model, prompt, answer["output_ids"]), atol=1e-5)
            assert [t for _, t, _ in meta["output_token_logprobs"]] == answer["output_ids"]
            assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 8}]
            assert (meta["weight_version"], meta["oldest_kv_version"], meta["id"]) == ("3", 3, "x")
            assert meta["extra_key"] == "@3"
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (20, 8)
            assert meta["finish_reason"] == {"type": "length", "length": 8}
            rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, 2, 2)
            whole = torch.tensor(prompt + answer["output_ids"])
            experts = p.model(whole, torch.arange(28), causal_rows(1, 28)).experts_NLK
            assert np.array_equal(np.sort(rows, -1), experts[5:-1].sort(-1).values.numpy())

    run(test, tmp_path)


def test_of_many_waiting_versions_only_the_newest_is_loaded(tmp_path):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        for serial in range(1, 8):
            p.write_version(serial, serial - 1)
            await p.announce(serial, serial - 1)
        await p.start_run()
        async with p.replica() as replica:
            _, seen = await p.applied(7)
            assert seen <= 2
            assert replica.agent.live is not None
            assert replica.agent.live.serial == 7

    run(test, tmp_path)


def test_versions_of_a_superseded_trainer_are_ignored(tmp_path):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        p.write_version(1, 0)
        p.write_version(2, None, incarnation=1)
        p.write_version(3, 1)
        await p.start_run()
        async with p.replica() as replica:
            await p.applied(0)
            await p.announce(2, incarnation=1)
            await p.announce(3, 1, incarnation=0)
            p.write_version(4, 2, incarnation=1)
            await p.announce(4, 2, incarnation=1)
            await p.applied(4)
            assert replica.agent.live is not None
            assert replica.agent.live.serial == 4
            assert 3 not in [applied.serial for applied in await p.all_applied()]

    run(test, tmp_path)


def test_a_damaged_version_takes_the_replica_out_with_the_reason_and_the_next_base_brings_it_back(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("services.inference.candidates.FIRST_DELAY_S", 0.05)

    async def test(p: Platform) -> None:
        p.write_version(0, None)
        await p.start_run()
        async with p.replica() as replica:
            await p.applied(0)
            p.write_version(1, 0)
            damaged = p.objects.head(f"{policy_prefix(RUN, 1)}/0000-0000.bin")
            p.objects.delete(damaged.key)
            await p.announce(1, 0)
            message, seen = await p.applied(1, ok=False)
            assert "payload" in message.reason
            assert (await ask(replica.health.url, "/readyz"))[0] == 503
            assert replica.agent.live is not None
            assert replica.agent.live.serial == 0  # what it had goes on
            p.write_version(2, None)
            await p.announce(2)
            await p.applied(2, after=seen)
            assert (await ask(replica.health.url, "/readyz"))[0] == 200

    run(test, tmp_path)


def test_a_swap_in_mid_generation_shows_in_the_version_spans_and_keeps_the_session(tmp_path):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        await p.start_run()
        async with p.replica() as replica:
            await p.applied(0)
            engine = replica.server.engine
            assert engine is not None
            engine.pause(abort=False).result()
            generating = asyncio.create_task(ask(replica.health.url, "/generate", body_of(list(range(8)), 56)))
            await eventually(lambda: engine.call(lambda: len(engine.batch.waiting)).result() == 1)

            loop, half = asyncio.get_running_loop(), asyncio.Event()

            def watch() -> None:  # stops the engine by itself in the middle of the generation
                request = engine.batch.waiting[0]

                def progress(_token: int, _logprob: float, _serial: int) -> None:
                    if engine.cache.length[request.row] == 30:
                        engine.pause(abort=False)
                        loop.call_soon_threadsafe(half.set)

                request.progress = progress

            engine.call(watch).result()
            engine.proceed().result()
            await half.wait()
            p.write_version(1, 0)
            await p.announce(1, 0)
            await p.applied(1)
            engine.proceed().result()
            _, answer = await generating
            spans = answer["meta_info"]["weight_versions"]
            assert [(s["version"], s["start"]) for s in spans] == [("0", 0), ("1", spans[0]["end"])]
            assert spans[1]["end"] == 56
            assert answer["meta_info"]["oldest_kv_version"] == 0
            again = list(range(8)) + answer["output_ids"][:20]
            _, later = await ask(replica.health.url, "/generate", body_of(again, 2, extra_key="1"))
            assert later["meta_info"]["cached_tokens"] == 0
            _, first = await ask(replica.health.url, "/generate", body_of(again, 2))  # names none
            assert (first["meta_info"]["extra_key"], first["meta_info"]["cached_tokens"]) == ("@1", 0)
            _, peer = await ask(replica.health.url, "/generate", body_of(again, 2))
            assert peer["meta_info"]["cached_tokens"] > 0

    run(test, tmp_path)


def test_a_client_that_goes_away_frees_its_row(tmp_path):
    async def test(p: Platform) -> None:
        await p.start_run()
        async with p.replica(context=60000) as replica:
            await p.applied(0)
            engine = replica.server.engine
            assert engine is not None
            leaving = asyncio.create_task(ask(replica.health.url, "/generate", body_of([1, 2, 3], 50000)))
            await eventually(lambda: engine.running == 1)
            leaving.cancel()
            await eventually(lambda: engine.running == 0)
            await eventually(replica.server.idle.is_set)

    run(test, tmp_path)


def test_a_replica_that_drains_still_frees_the_rows_of_clients_that_go_away_and_of_aborted_requests(tmp_path):
    async def test(p: Platform) -> None:
        await p.start_run()
        async with p.replica(context=60000) as replica:
            await p.applied(0)
            url, engine = replica.health.url, replica.server.engine
            assert engine is not None
            leaving = asyncio.create_task(ask(url, "/generate", body_of([1, 2, 3], 50000)))
            aborted = asyncio.create_task(ask(url, "/generate", body_of([4, 5, 6], 50000, rid="aborted")))
            await eventually(lambda: engine.running == 2)
            replica.server.draining = True
            leaving.cancel()
            await eventually(lambda: engine.running == 1)
            assert (await ask(url, "/abort_request", {"rid": "aborted"}))[0] == 200
            _, answer = await aborted
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            await eventually(replica.server.idle.is_set)

    run(test, tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampling_params": {"top_p": 0.9}}, ["sampling_params.top_p", "0.9", "allowed: 1"]),
        ({"sampling_params": {"top_k": 20}}, ["sampling_params.top_k", "20", "allowed: -1"]),
        ({"sampling_params": {"repetition_penalty": 1.1}}, ["repetition_penalty", "1.1"]),
        ({"sampling_params": {"temprature": 0.2}}, ["sampling_params.temprature", "0.2", "Did you mean temperature?"]),
        ({"sampling_params": {"typical_p": 0.5}}, ["sampling_params.typical_p", "0.5", "max_new_tokens"]),
        ({"temperature": 0.2}, ["temperature", "in sampling_params"]),
        ({"sampling_parameters": {}}, ["sampling_parameters", "Did you mean sampling_params?"]),
        ({"sampling_params": {"temperature": -1}}, ["temperature", "-1", "0..100"]),
        ({"sampling_params": {"max_new_tokens": 0}}, ["max_new_tokens", "0", "1 and more"]),
        ({"sampling_params": {"max_new_tokens": "many"}}, ["max_new_tokens", "int"]),
        ({"sampling_params": [1]}, ["sampling_params", "object"]),
        ({"input_ids": [1, 64]}, ["input_ids", "64", "0..63"]),
        ({"input_ids": [-1]}, ["input_ids", "0..63"]),
        ({"input_ids": [1 << 40]}, ["input_ids"]),
        ({"input_ids": []}, ["input_ids", "1..64"]),
        ({"input_ids": [1] * 65}, ["input_ids", "65", "1..64"]),
        ({"input_ids": "abc"}, ["array", "input_ids"]),
        ({"return_routed_experts": True, "routed_experts_start_len": 9}, ["routed_experts_start_len", "9", "0..3"]),
    ],
)
def test_bad_input_is_refused_by_field_value_and_what_is_allowed(change, said, shared_replica):
    status, text = shared_replica({"input_ids": [1, 2, 3], **change})
    assert status == 400
    message = json.loads(text)["error"]["message"]
    assert all(word in message for word in said), message


@pytest.fixture(scope="module")
def shared_replica(tmp_path_factory):
    """A replica in a process of its own that serves a checkpoint directory; returns a function that asks it."""
    platform = Platform(tmp_path_factory.mktemp("shared"))
    process, url = start_process(platform, ETUDE_CHECKPOINT=str(platform.base))

    def ask_it(body: Any) -> tuple[int, str]:
        async def post() -> tuple[int, str]:
            async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
                return response.status, await response.text()

        return asyncio.run(post())

    yield ask_it
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=patient(30)) == 0


def test_a_checkpoint_directory_is_served_as_version_0_without_a_run(shared_replica):
    status, text = shared_replica(body_of([1, 2, 3], 4))
    assert status == 200
    assert json.loads(text)["meta_info"]["weight_version"] == "0"


def test_metrics_and_info_speak_sglangs_names(tmp_path):
    async def test(p: Platform) -> None:
        await p.start_run()
        async with p.replica() as replica:
            await p.applied(0)
            url = replica.health.url
            await ask(url, "/generate", body_of([1, 2, 3], 4))
            async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
                text = await response.text()
            names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
            assert names >= {
                "sglang:num_running_reqs",
                "sglang:num_queue_reqs",
                "sglang:token_usage",
                "sglang:gen_throughput",
                "sglang:generation_tokens_total",
                "etude_inference_steps_total",
                "etude_inference_swap_pause_seconds_count",
            }
            info = (await ask(url, "/get_server_info"))[1]
            assert (info["run"], info["serial"], info["context_length"], info["waiting"]) == (RUN, 0, 64, 0)
            model = (await ask(url, "/model_info"))[1]
            assert (model["weight_version"], model["vocab_size"], model["is_generation"]) == ("0", 64, True)
            assert (await ask(url, "/health"))[0] == 200

    run(test, tmp_path)


def test_a_replica_that_shuts_down_says_so_and_another_run_replaces_the_first(tmp_path):
    async def test(p: Platform) -> None:
        await p.start_run("r-first")
        async with p.replica() as replica:
            first, seen = await p.applied(0)
            assert first.run == "r-first"
            p.write_version(0, None)
            await p.start_run()
            second, seen = await p.applied(0, after=seen)
            assert second.run == RUN
            assert replica.agent.run_id == RUN
            status, _ = await ask(replica.health.url, "/generate", body_of([1, 2, 3], 4))
            assert status == 200
        gone, _ = await p.applied(0, ok=False, after=seen)
        assert gone.reason == "shutting down"

    run(test, tmp_path)


@pytest.mark.parametrize("said", [None, "finished"])
def test_a_run_that_cannot_be_read_takes_no_replica_from_one_that_can(tmp_path, monkeypatch, said):
    monkeypatch.setattr("services.inference.candidates.FIRST_DELAY_S", 0.05)

    async def test(p: Platform) -> None:
        p.write_version(0, None)
        await p.start_run()
        async with p.replica() as replica:
            _, seen = await p.applied(0)
            await p.start_unreadable("r-broken")
            await eventually(lambda: "r-broken" in replica.agent.following.started)
            if said is not None:  # the scheduler's word
                await p.bus.publish(RUNS_STATE, "r-broken", status("r-broken", said))
            p.write_version(1, 0)
            await p.announce(1, 0)
            message, _ = await p.applied(1, after=seen)
            assert message.run == RUN
            assert (await ask(replica.health.url, "/readyz"))[0] == 200
            await p.start_run("r-later")
            await eventually(lambda: replica.agent.run_id == "r-later")

    run(test, tmp_path)


def test_a_replica_that_starts_beside_a_run_that_cannot_be_read_serves_the_one_before_and_the_other_once_it_can(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("services.inference.candidates.FIRST_DELAY_S", 0.05)

    async def test(p: Platform) -> None:
        await p.start_run()
        await p.start_unreadable("r-broken")
        async with p.replica() as replica:
            message, _ = await p.applied(0)
            assert message.run == RUN
            await eventually(lambda: "r-broken" in replica.agent.following.started)
            unread = replica.agent.candidates.unread
            await eventually(lambda: "r-broken" in unread and unread["r-broken"].failures > FAILURES_TOLERATED)
            assert replica.agent.run_id == RUN
            assert (await ask(replica.health.url, "/readyz"))[0] == 200
            started = replica.agent.following.started["r-broken"]
            p.objects.put(started.key, p.objects.get(replica.agent.following.started[RUN]))
            await p.bus.publish(RUNS_STATE, "r-broken", status("r-broken", "running", p.objects.head(started.key)))
            await eventually(lambda: replica.agent.run_id == "r-broken")

    run(test, tmp_path)


def test_a_run_that_ends_before_its_first_version_gives_its_replica_back_to_the_one_that_is_alive(tmp_path):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        await p.start_run()
        await p.start_run("r-short")
        async with p.replica() as replica:
            await eventually(lambda: replica.agent.run_id == "r-short")
            await p.bus.publish(RUNS_STATE, "r-short", status("r-short", "finished"))
            p.write_version(1, 0)
            await p.announce(1, 0)
            message, _ = await p.applied(1)
            assert message.run == RUN

    run(test, tmp_path)


def test_an_evaluation_replica_serves_exactly_what_it_is_pinned_to(tmp_path):
    async def test(p: Platform) -> None:
        for serial in range(3):
            p.write_version(serial, serial - 1 if serial else None)
            await p.announce(serial, serial - 1)
        await p.start_run()
        async with p.replica(pool="evaluation") as replica:
            message, seen = await p.applied(0)
            assert message.pool == "evaluation"
            url = replica.health.url
            status, answer = await ask(url, "/pin", {"serial": 9})
            assert status == 400
            assert "9" in answer["error"]["message"]
            assert await ask(url, "/pin", {"serial": 1}) == (200, {"serial": 1, "run": RUN})
            message, _ = await p.applied(1, after=seen)
            assert not message.on_request  # it stays, whatever is evaluated
            checked = (await ask(url, "/weights_checker", {}))[1]
            assert checked["checksum"] == read_manifest(p.objects, p.versions[1].manifest).checksum
            assert await ask(url, "/pin", {"serial": 0}) == (200, {"serial": 0, "run": RUN})
        async with p.replica(pool="evaluation", pinned=2):
            _, again = await p.applied(2)
            assert again > seen

    run(test, tmp_path)


def test_the_policy_that_a_run_began_with_is_served_also_when_its_published_weights_are_deleted(tmp_path):
    async def test(p: Platform) -> None:
        for serial in range(2):
            p.write_version(serial, None)
            await p.announce(serial)
        for key in list(p.objects.list(f"{policy_prefix(RUN, 0)}/0")):
            p.objects.delete(key)
        await p.start_run()
        async with p.replica(pool="evaluation", pinned=0) as replica:
            await p.applied(0)
            checked = (await ask(replica.health.url, "/weights_checker", {}))[1]
            assert checked["checksum"] == read_manifest(p.objects, p.versions[0].manifest).checksum

    run(test, tmp_path)


def test_an_engine_for_evaluations_goes_to_the_version_that_is_evaluated_and_stays(tmp_path):
    async def test(p: Platform) -> None:
        ref = Ref(key="x", size=1, checksum="0" * 32)

        def asked(evaluation: str, serial: int) -> EvalRequested:
            return EvalRequested(run=RUN, eval=evaluation, serial=serial, pack=ref, pack_hidden=ref)

        async def end(evaluation: str, serial: int) -> None:
            ended = EvalFinished(run=RUN, eval=evaluation, serial=serial, report=ref, figures={})
            await p.bus.publish(EVALS_FINISHED, RUN, ended)

        for serial in range(4):
            p.write_version(serial, serial - 1 if serial else None)
            await p.announce(serial, serial - 1)
        await p.start_run()
        await p.bus.publish(EVALS_REQUESTED, RUN, asked("long ago", 3))
        await end("long ago", 3)
        async with p.replica(pool="evaluation"):
            message, seen = await p.applied(0)
            assert (message.pool, message.on_request) == ("evaluation", True)
            await p.bus.publish(EVALS_REQUESTED, RUN, asked("first", 2))
            await p.bus.publish(EVALS_REQUESTED, RUN, asked("second", 1))
            _, seen = await p.applied(2, after=seen)
            await end("first", 2)
            _, seen = await p.applied(1, after=seen)
            await end("second", 1)
            await p.bus.publish(EVALS_REQUESTED, RUN, asked("third", 3))
            _, seen = await p.applied(3, after=seen)
            assert seen == 4  # none for the evaluation that was over, nor the base in between

    run(test, tmp_path)


def test_an_engine_that_serves_others_goes_where_a_version_is_promoted_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setattr("services.inference.candidates.FIRST_DELAY_S", 0.05)

    async def test(p: Platform) -> None:
        async def promote(serial: int) -> None:
            await p.bus.publish(POLICIES_PROMOTED, RUN, PolicyPromoted(run=RUN, serial=serial, by="test"))

        for serial in range(4):
            p.write_version(serial, serial - 1 if serial else None)
            await p.announce(serial, serial - 1)
        await p.start_run()
        async with p.replica(pool="serving") as replica:
            url = replica.health.url
            while "a version to be promoted (policies.promoted)" not in str(await ask(url, "/readyz")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await promote(2)
            message, seen = await p.applied(2)
            assert (message.pool, message.on_request, seen) == ("serving", False, 1)  # not a version before
            await p.start_run("r-20260101T000100-0002")
            p.write_version(4, 3)
            await p.announce(4, 3)
            await promote(9)
            message, seen = await p.applied(9, ok=False, after=seen)
            assert "version 9" in message.reason
            assert (await ask(url, "/readyz"))[0] == 200  # what it has goes on
            assert (await ask(url, "/model_info"))[1]["serial"] == 2
            await promote(1)
            _, seen = await p.applied(1, after=seen)
        await promote(3)
        async with p.replica(pool="serving"):
            message, after = await p.applied(3, after=seen)
            assert (message.run, after - seen) == (
                RUN,
                2,
            )  # the farewell of the one before, and none of the old promotions

    run(test, tmp_path)


@pytest.mark.parametrize(
    ("run_id", "serial", "said"),
    [
        (RUN, 2, f"version 2 of run {RUN}: it is not there"),
        (RUN, 1, "the weights of version 1 are deleted"),
        ("r-broken", 0, "the configuration of run r-broken"),
    ],
)
def test_where_the_promoted_version_of_another_run_is_not_to_be_had_what_is_served_goes_on_and_it_says_why(
    tmp_path, monkeypatch, run_id, serial, said
):
    monkeypatch.setattr("services.inference.candidates.FIRST_DELAY_S", 0.05)

    async def test(p: Platform) -> None:
        async def promote(run: str, serial: int) -> None:
            await p.bus.publish(POLICIES_PROMOTED, run, PolicyPromoted(run=run, serial=serial, by="test"))

        p.write_version(0, None)
        p.write_version(1, None)
        for key in list(p.objects.list(f"{policy_prefix(RUN, 1)}/0")):
            p.objects.delete(key)
        p.write_version(3, None)
        await p.start_unreadable("r-broken")
        await p.start_run()
        await p.start_run("r-first")
        async with p.replica(pool="serving") as replica:
            url = replica.health.url
            await promote("r-first", 0)
            _, seen = await p.applied(0)
            engine = replica.server.engine
            await promote(run_id, serial)
            message, seen = await p.applied(serial, ok=False, after=seen)
            assert (message.run, said in message.reason) == (run_id, True), message.reason
            assert (await ask(url, "/readyz"))[0] == 200
            assert (await ask(url, "/generate", body_of([1, 2], 2)))[0] == 200
            info = (await ask(url, "/model_info"))[1]
            assert (info["run"], info["serial"], replica.server.engine is engine) == ("r-first", 0, True)
            await promote("r-first", 0)
            message, seen = await p.applied(0, after=seen)  # also of what it never left, somebody waits for its word
            assert (message.run, replica.server.engine is engine) == ("r-first", True)
            await promote(RUN, 3)
            message, _ = await p.applied(3, after=seen)
            assert message.run == RUN

    run(test, tmp_path)


def test_the_engine_of_a_promoted_run_takes_over_when_it_serves_and_not_before(tmp_path, monkeypatch):
    monkeypatch.setattr("services.inference.candidates.FIRST_DELAY_S", 0.05)

    async def test(p: Platform) -> None:
        async def promote(run: str, serial: int) -> None:
            await p.bus.publish(POLICIES_PROMOTED, run, PolicyPromoted(run=run, serial=serial, by="test"))

        p.write_version(0, None)
        p.write_version(1, None)
        key = next(iter(p.objects.list(f"{policy_prefix(RUN, 1)}/0")))
        whole = p.objects.get(p.objects.head(key))
        p.objects.put(key, bytes(len(whole)))
        await p.start_run()
        await p.start_run("r-first")
        async with p.replica(pool="serving") as replica:
            url = replica.health.url
            await promote("r-first", 0)
            _, seen = await p.applied(0)
            before = replica.server.engine
            await promote(RUN, 1)
            message, seen = await p.applied(1, ok=False, after=seen)
            assert message.run == RUN
            assert replica.agent.run_id == RUN  # its engine is there, with the base
            assert (await ask(url, "/readyz"))[0] == 200
            assert (await ask(url, "/generate", body_of([1, 2], 2)))[0] == 200
            assert (await ask(url, "/weights_checker", {}))[1]["run"] == "r-first"
            p.objects.put(key, whole)
            message, _ = await p.applied(1, after=seen)
            assert message.run == RUN
            assert (await ask(url, "/weights_checker", {}))[1]["run"] == RUN
            assert not before.alive

    run(test, tmp_path)


def test_a_killed_replica_comes_back_and_catches_up_by_itself(tmp_path):
    platform = Platform(tmp_path)

    def version(serial: int) -> None:
        platform.write_version(serial, serial - 1 if serial else None)
        asyncio.run(platform.announce(serial, serial - 1))

    version(0)
    asyncio.run(platform.start_run())
    version(1)
    process, url = start_process(platform)
    assert asyncio.run(ask(url, "/model_info"))[1]["serial"] == 1
    process.kill()
    process.wait()
    version(2)
    version(3)
    process, url = start_process(platform)
    try:
        assert asyncio.run(ask(url, "/model_info"))[1]["serial"] == 3
        shown = subprocess.run(
            [sys.executable, "-m", "etude.cli", "inference", "checksum", url],
            env={**os.environ, "ETUDE_STATE": str(platform.state)},
            capture_output=True,
            text=True,
        )
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["equal"] is True
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=patient(30)) == 0
    asyncio.run(platform.bus.close())
