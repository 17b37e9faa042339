"""Rollout against the embedded engine as a process of its own: stopped, killed, started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.contracts import topics
from shared.contracts.messages import AttemptKey, RolloutFinished
from shared.contracts.run import Sampling
from shared.contracts.trajectory import unpack, unpack_routing
from shared.model import ModelConfig, Transformer, save_checkpoint
from shared.telemetry import Health
from tests.integration.engine_platform import ask
from tests.integration.rollout_platform import RUN, Platform, make_checkpoint, platform
from tests.patience import eventually, patient
from tests.ruling import status
from tests.standstill import stand_still

SESSIONS, AT_WORK = 64, 48
START_S = 120  # on a machine that is busy with something else
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    make_checkpoint(directory)
    (directory / "config.json").unlink()
    torch.manual_seed(0)
    save_checkpoint(Transformer(ModelConfig.from_dict(MODEL)), directory)
    return directory


@contextlib.contextmanager
def engine(p: Platform, name: str = "inference") -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "ETUDE_STATE": str(p.state), "ETUDE_NAME": name, "OMP_NUM_THREADS": "1"}
    with (p.state / f"{name}.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "services.inference"], env=environment, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def address(p: Platform, name: str = "inference") -> str:
    return json.loads((p.state / "run" / f"{name}.json").read_text())["url"]


async def said(p: Platform, name: str = "inference") -> dict[str, Any]:
    """What a replica tells of itself."""
    return (await ask(address(p, name), "/server_info"))[1]


async def begin(p: Platform) -> None:
    config = p.objects.head(f"runs/{RUN}/config.json")
    await p.bus.publish(topics.RUNS_STATE, RUN, status(RUN, "running", config))


async def in_hand(p: Platform, health: Health) -> list[AttemptKey]:
    """SESSIONS attempts, each with a generation that waits at an engine which stands still."""
    await eventually(lambda: health.ready, seconds=START_S)
    await ask(address(p), "/pause_generation", {"mode": "in_place"})
    sampling = Sampling(max_completion_tokens=200)
    keys = [await p.ask(p.request(f"p{1 + i % 6}", sampling=sampling)) for i in range(SESSIONS)]

    async def all_wait() -> bool:
        return (await said(p))["waiting"] >= SESSIONS

    await eventually(all_wait, f"{SESSIONS} sessions to wait", START_S)
    return keys


async def kill_at_work(p: Platform, process: subprocess.Popen[bytes]) -> int:
    """Lets it go on, and kills it with at least AT_WORK sessions running. Returns how many ran."""
    await ask(address(p), "/continue_generation", {})
    async with asyncio.timeout(patient(START_S)):
        while (running := (await said(p))["running"]) < AT_WORK:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    process.kill()
    process.wait()
    return running


async def none_is_lost(p: Platform, keys: list[AttemptKey]) -> None:
    finished = await p.heard(topics.ROLLOUTS_FINISHED, len(keys), seconds=START_S)
    assert sorted(f.key.attempt for f in finished) == sorted(k.attempt for k in keys)  # each once
    for one in finished:
        trajectory = unpack(p.objects.get(one.trajectory))
        assert trajectory.routing is not None
        rows = unpack_routing(p.objects.get(trajectory.routing))
        assert [len(r) for r in rows] == [len(s.tokens) - 1 for s in trajectory.segments]


def test_of_64_sessions_none_is_lost_when_their_engine_is_killed_and_started_again(
    tmp_path: Path, checkpoint: Path
) -> None:
    async def scenario() -> None:
        async with platform(tmp_path, checkpoint) as p, p.worker(rollout_concurrency=SESSIONS) as health:
            await begin(p)
            with engine(p) as process:
                keys = await in_hand(p, health)
                assert await kill_at_work(p, process) >= AT_WORK
            with engine(p):
                await none_is_lost(p, keys)

    asyncio.run(scenario())


def test_of_64_sessions_none_is_lost_when_their_engine_is_killed_and_another_one_takes_over(
    tmp_path: Path, checkpoint: Path
) -> None:
    async def scenario() -> None:
        async with platform(tmp_path, checkpoint) as p, p.worker(rollout_concurrency=SESSIONS) as health:
            await begin(p)
            with engine(p) as process:
                keys = await in_hand(p, health)
                with engine(p, "other"):
                    await p.heard(topics.POLICIES_APPLIED, 1, lambda m: m.replica == "other", seconds=START_S)
                    assert (await said(p, "other"))["steps"] == 0
                    assert await kill_at_work(p, process) >= AT_WORK
                    await none_is_lost(p, keys)
                    assert (await said(p, "other"))["steps"] > 0

    asyncio.run(scenario())


def test_attempts_survive_an_engine_that_is_stopped_and_one_that_is_killed(tmp_path: Path, checkpoint: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path, checkpoint) as p, p.worker() as health:
            await begin(p)
            keys = []

            async def begin_some(count: int) -> None:
                for _ in range(count):
                    sampling = Sampling(max_completion_tokens=100)
                    keys.append(await p.ask(p.request(f"p{1 + len(keys) % 6}", sampling=sampling)))

            with engine(p) as process:
                await eventually(lambda: health.ready, seconds=START_S)
                await begin_some(6)
                await p.heard(topics.ROLLOUTS_FINISHED, 6, seconds=START_S)
                await asyncio.to_thread(stand_still, process)
                await eventually(lambda: not health.ready)
                await begin_some(6)
                process.send_signal(signal.SIGCONT)
                await p.heard(topics.ROLLOUTS_FINISHED, 12, seconds=START_S)
                await begin_some(16)
                await p.heard(topics.ROLLOUTS_FINISHED, 14, seconds=START_S)
            with engine(p):
                finished = await p.heard(topics.ROLLOUTS_FINISHED, len(keys), seconds=START_S)
            assert {f.key.attempt for f in finished} == {k.attempt for k in keys}
            for one in finished:
                assert isinstance(one, RolloutFinished)
                assert (one.oldest_version, one.oldest_kv_version, one.newest_version) == (0, 0, 0)
                trajectory = unpack(p.objects.get(one.trajectory))
                assert trajectory.routing is not None
                for segment, rows in zip(
                    trajectory.segments, unpack_routing(p.objects.get(trajectory.routing)), strict=True
                ):
                    assert rows.shape == (len(segment.tokens) - 1, 2, 2)
                    assert (segment.logprobs[segment.loss_mask] < 0).all()

    asyncio.run(scenario())
