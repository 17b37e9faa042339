"""Rollout against the embedded engine as a process of its own: stopped, killed, started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared.contracts import topics
from shared.contracts.messages import RolloutFinished, RunControl
from shared.contracts.run import Sampling
from shared.contracts.trajectory import unpack, unpack_routing
from shared.model import ModelConfig, Transformer, save_checkpoint
from tests.integration.rollout_platform import RUN, Platform, eventually, make_checkpoint, platform

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
def engine(p: Platform) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "ETUDE_STATE": str(p.state), "ETUDE_NAME": "inference", "OMP_NUM_THREADS": "1"}
    with (p.state / "inference.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "services.inference"], env=environment, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_attempts_survive_an_engine_that_is_stopped_and_one_that_is_killed(tmp_path: Path, checkpoint: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path, checkpoint) as p, p.worker() as health:
            config = p.objects.head(f"runs/{RUN}/config.json")
            await p.bus.publish(topics.RUNS_CONTROL, RUN, RunControl(run=RUN, action="start", config=config))
            keys = []

            async def ask(count: int) -> None:
                for _ in range(count):
                    sampling = Sampling(max_completion_tokens=100)
                    keys.append(await p.ask(p.request(f"p{1 + len(keys) % 6}", sampling=sampling)))

            with engine(p) as process:
                await eventually(lambda: health.ready, 60)
                await ask(6)
                await p.heard(topics.ROLLOUTS_FINISHED, 6)
                process.send_signal(signal.SIGSTOP)
                await eventually(lambda: not health.ready)
                await ask(6)
                process.send_signal(signal.SIGCONT)
                await p.heard(topics.ROLLOUTS_FINISHED, 12)
                await ask(16)
                await p.heard(topics.ROLLOUTS_FINISHED, 14)
            with engine(p):
                finished = await p.heard(topics.ROLLOUTS_FINISHED, len(keys))
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
