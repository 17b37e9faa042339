"""An inference service with a run to serve and a trainer's part played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import torch

from services.inference.config import InferenceSettings
from services.inference.published import bits_of
from services.inference.service import Inference
from shared import bus as buses
from shared import objects as stores
from shared.contracts.messages import PolicyApplied, PolicyPublished
from shared.contracts.run import Ref, RunConfig
from shared.contracts.topics import POLICIES_APPLIED, POLICIES_PUBLISHED, RUNS_STATE
from shared.model import ModelConfig, Transformer, causal_rows, load_checkpoint, save_checkpoint
from shared.weights import Version, publish
from shared.weights.checkpoint_objects import upload_directory
from tests.patience import patient
from tests.ruling import status

START_S = 180  # on a machine that is busy with something else
RUN = "r-20260101T000000-0001"
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.3,
}


class Platform:
    """One state directory, a run with a base, and a trainer's part: versions on demand."""

    def __init__(self, state: Path, config: dict[str, Any] = CONFIG, *, context: int = 64) -> None:
        self.state = state
        torch.manual_seed(0)
        self.model = Transformer(ModelConfig.from_dict(config)).requires_grad_(False)
        self.base = state / "base"
        save_checkpoint(self.model, self.base)
        (self.base / "etude.json").write_text(json.dumps({"format": "compact-1", "context": context}))
        self.model = load_checkpoint(self.base).requires_grad_(False)
        self.settings = InferenceSettings(state=state, name="replica", cache_rows=8, drain_s=1)
        self.objects = stores.connect(self.settings.objects_url)
        self.bus = buses.connect(self.settings.bus_url, client="test")
        self.versions: dict[int, Version] = {}

    async def start_run(self, run: str = RUN, base_of: Path | None = None) -> None:
        base = upload_directory(self.objects, f"runs/{run}/base", base_of or self.base)
        nothing = Ref(key="nothing", size=0, checksum="0" * 32)
        config = RunConfig(run=run, base=base, pack=nothing, pack_hidden=nothing)
        ref = self.objects.put(f"runs/{run}/config.json", msgspec.json.encode(config))
        await self.bus.publish(RUNS_STATE, run, status(run, "running", ref))

    async def start_unreadable(self, run: str) -> None:
        """A run whose configuration nobody finds."""
        gone = Ref(key=f"runs/{run}/config.json", size=2, checksum="0" * 32)
        await self.bus.publish(RUNS_STATE, run, status(run, "running", gone))

    def write_version(self, serial: int, parent: int | None, *, incarnation: int = 0) -> Ref:
        """Changes the weights a little and puts the version into the store. parent None: a full base."""
        if serial:
            torch.manual_seed(serial)
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.03).copy_(parameter.bfloat16().float())
        bits = bits_of(self.model)
        before = None if parent is None else self.versions[parent]
        ref = publish(self.objects, RUN, serial, incarnation, serial, before, bits)
        self.versions[serial] = Version(serial, ref, bits)
        return ref

    async def announce(self, serial: int, parent: int = -1, *, incarnation: int = 0) -> None:
        message = PolicyPublished(
            run=RUN,
            serial=serial,
            incarnation=incarnation,
            step=serial,
            parent=parent,
            manifest=self.versions[serial].manifest,
        )
        await self.bus.publish(POLICIES_PUBLISHED, RUN, message)

    async def applied(self, serial: int, *, ok: bool = True, after: int = 0) -> tuple[PolicyApplied, int]:
        """Waits for the announcement; returns it with how many were seen before it. Skips the first `after`."""
        seen = 0
        async with asyncio.timeout(patient(60)):
            async for delivery in self.bus.deliveries([POLICIES_APPLIED], group=None, max_in_flight=16):
                delivery.done()
                seen += 1
                m = delivery.message
                if seen > after and m.serial == serial and m.ok == ok:
                    return m, seen
        raise AssertionError("unreachable")

    async def all_applied(self) -> list[PolicyApplied]:
        """Return what was announced up to now."""
        deliveries = self.bus.deliveries([POLICIES_APPLIED], group=None, max_in_flight=16)
        found: list[PolicyApplied] = []

        async def read() -> None:
            async for delivery in deliveries:
                found.append(delivery.message)
                delivery.done()

        reading = asyncio.create_task(read())
        await deliveries.caught_up()
        reading.cancel()
        return found

    @contextlib.asynccontextmanager
    async def replica(self, *, objects: Any = None, **changes: Any) -> AsyncIterator[Inference]:
        inference = Inference(self.settings.model_copy(update=changes), self.bus, objects or self.objects)
        stop = asyncio.Event()
        async with inference.health:
            running = asyncio.create_task(inference.run(stop))
            try:
                yield inference
            finally:
                stop.set()
                await running


class Store:
    """The platform's store as one replica sees it: `away` while a test says so. `fetched`: keys; `refused`: calls, while away."""

    def __init__(self, objects: stores.Objects) -> None:
        self._objects, self.away, self.refused = objects, False, 0
        self.fetched: list[str] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._objects, name)

        def ask(*arguments: Any) -> Any:
            if self.away:
                self.refused += 1
                raise stores.ObjectsUnavailable("no answer")
            if name == "get":
                self.fetched.append(arguments[0].key)
            return call(*arguments)

        return ask

    def payloads(self) -> list[str]:
        return [key for key in self.fetched if key.endswith(".bin")]


def another_base(folder: Path, *, context: int = 64, **changes: Any) -> Path:
    """A checkpoint that is none of the platform's."""
    torch.manual_seed(1)
    save_checkpoint(Transformer(ModelConfig.from_dict({**CONFIG, **changes})), folder)
    (folder / "etude.json").write_text(json.dumps({"format": "compact-1", "context": context}))
    return folder


async def waits(url: str) -> list[str]:
    """What /readyz names."""
    return [wait["waits_on"] for wait in (await ask(url, "/readyz"))[1]["waits"]]


def run(test: Any, tmp_path: Path) -> None:
    async def body() -> None:
        platform = Platform(tmp_path)
        try:
            await test(platform)
        finally:
            await platform.bus.close()

    asyncio.run(asyncio.wait_for(body(), patient(120)))


async def ask(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        request = session.get(url + path) if body is None else session.post(url + path, json=body)
        async with request as response:
            return response.status, await response.json(content_type=None)


def body_of(tokens: list[int], new: int = 5, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_new_tokens": new, **more.pop("sampling", {})}
    return {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, **more}


def expected_logprobs(model: Transformer, prompt: list[int], sampled: list[int]) -> np.ndarray:
    whole = torch.tensor(prompt + sampled)
    out = model(whole, torch.arange(len(whole)), causal_rows(1, len(whole)))
    table = model.logits(out.hidden_ND).log_softmax(-1)[len(prompt) - 1 : -1]
    return table[torch.arange(len(sampled)), sampled].numpy()


def start_process(platform: Platform, **environment: str) -> tuple[subprocess.Popen[bytes], str]:
    """`python -m services.inference`, ready."""
    env = {**os.environ, "ETUDE_STATE": str(platform.state), "ETUDE_NAME": "replica", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "services.inference"], env={**env, **environment})
    note = platform.state / "run" / "replica.json"
    deadline = time.monotonic() + patient(START_S)
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            found = json.loads(note.read_text())
            if found["pid"] == process.pid and asyncio.run(ask(found["url"], "/readyz"))[0] == 200:
                return process, found["url"]
        assert process.poll() is None, "the service ended"
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"not ready within {START_S} s")
