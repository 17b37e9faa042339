"""A small platform for tests of rollout and evaluator: embedded bus and objects, one run with a pack, an engine over HTTP
that speaks `/generate` and samples what a function of the prompt says."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from aiohttp import web

from services.rollout import service
from services.rollout.config import RolloutSettings
from services.rollout.runs import Runs
from services.rollout.service import Worker, serve
from services.trainer.base.tokenizer import train
from shared import bus as buses
from shared import objects as stores
from shared import sandbox
from shared.bus import Bus
from shared.contracts import topics
from shared.contracts.ids import attempt_id
from shared.contracts.messages import AttemptKey, PolicyApplied, RolloutRequested
from shared.contracts.run import Purpose, Ref, RunConfig, Sampling
from shared.environments import Places
from shared.objects import Objects
from shared.problems import Case, FunctionProblem
from shared.problems.pack import write
from shared.renderers.formats.compact_1 import Compact
from shared.renderers.registry import load_renderer
from shared.telemetry import Health
from shared.weights.checkpoint_objects import upload_directory
from tests.patience import eventually, patient

RUN, LAYERS, K, EXPERTS = "r-test", 2, 2, 4
Policy = Callable[[list[int]], list[int]]


def problem(i: int) -> FunctionProblem:
    return FunctionProblem(
        id=f"p{i}",
        files={"f.py": f"def f(a):\n    return a - {i}\n"},
        entry="f",
        visible=[Case(args="[1]", expected=str(1 + i))],
        actual=[str(1 - i)],
    )


PROBLEMS = [problem(i) for i in range(1, 7)]


def make_checkpoint(directory: Path) -> Compact:
    """A checkpoint directory without weights: all that a rollout worker reads of one."""
    directory.mkdir(parents=True)
    sources = sorted((Path(__file__).parents[2] / "shared").rglob("*.py"))
    lines = [line.strip() for path in sources for line in path.read_text().splitlines()]
    train(lines, directory / "tokenizer.json", vocabulary=1024)
    (directory / "etude.json").write_text(json.dumps({"format": "compact-1", "context": 512}))
    config = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": K}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"weights that no rollout worker needs")
    made = load_renderer(directory)
    assert isinstance(made, Compact)
    return made


def routing_of(sequence: list[int]) -> np.ndarray:
    """[len - 1, L, K], a function of position and token."""
    at = np.arange(len(sequence)) + np.array(sequence)
    return ((at[:-1, None, None] + np.arange(LAYERS)[:, None] + np.arange(K)) % EXPERTS).astype("<i4")


@dataclass
class Engine:
    """`serial` is what it serves. `free`: while clear, generations whose prompt fits `held` wait. `dead`: it answers nothing,
    like a stopped process. `hung`: it answers, and makes no step; `paused`: and says that it was told to."""

    policy: Policy
    serial: int = 1
    name: str = "engine"
    pool: str = "rollout"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    free: asyncio.Event = field(default_factory=asyncio.Event)
    held: Callable[[list[int]], bool] = lambda _: True
    dead: bool = False
    hung: bool = False
    paused: bool = False
    steps: int = 0
    looks: int = 0  # how often it was asked for its steps
    probes: int = 0  # how often it was asked whether it lives
    statuses: list[int] = field(default_factory=list)  # the answers to the next generations
    failing: int = 0  # so many generations from now on are cut off in the middle
    places: int = 1 << 30  # so many generations at a time; beyond it the answer is 503
    retry_after: str = "0.2"
    running_now: int = 0
    refused: int = 0
    waiting: int = 0
    aborts: int = 0  # so many generations are ended early from now on, as those are that /abort_request names
    slow: bool = False  # what is ended early has sampled nothing yet; else half of its answer
    sampled: int = 0  # tokens of all answers
    partial: list[int] = field(default_factory=list)  # of the last generation that was ended early
    ended: dict[str, asyncio.Event] = field(default_factory=dict)  # by rid

    def __post_init__(self) -> None:
        self.free.set()

    async def generate(self, request: web.Request) -> web.Response:
        if self.running_now >= self.places:
            self.refused += 1
            return web.json_response({"error": {}}, status=503, headers={"Retry-After": self.retry_after})
        if self.statuses:
            return web.json_response({"error": {}}, status=self.statuses.pop())
        self.running_now += 1
        try:
            return await self._generate(request)
        finally:
            self.running_now -= 1

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        ended = self.ended.setdefault(body["rid"], asyncio.Event())
        if self.held(body["input_ids"]):
            self.waiting += 1
            waits = [asyncio.create_task(event.wait()) for event in (self.free, ended)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            self.waiting -= 1
        await self.silence()
        if self.failing:
            self.failing -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        prompt = body["input_ids"]
        full = self.policy(prompt)
        sampled = full[: body["sampling_params"]["max_new_tokens"]]
        finish = "stop" if len(sampled) == len(full) else "length"
        if ended.is_set() or self.aborts:
            self.aborts = max(0, self.aborts - 1)
            sampled, finish = sampled[: 0 if self.slow else (len(sampled) + 1) // 2], "abort"
            self.partial = sampled
        self.sampled += len(sampled)
        start = body["routed_experts_start_len"]
        experts = np.ascontiguousarray(routing_of(prompt + sampled)[start:])
        meta = {
            "output_token_logprobs": [[-0.5, token, None] for token in sampled],
            "weight_version": str(self.serial),
            "weight_versions": [{"version": str(self.serial), "start": 0, "end": len(sampled)}],
            "routed_experts": base64.b64encode(experts.tobytes()).decode(),
            "oldest_kv_version": self.serial,
            "extra_key": body.get("extra_key", f"@{self.serial}"),
            "finish_reason": {"type": finish},
        }
        return web.json_response({"output_ids": sampled, "meta_info": meta})

    async def health(self, _: web.Request) -> web.Response:
        await self.silence()
        self.probes += 1
        return web.Response()

    async def server_info(self, _: web.Request) -> web.Response:
        await self.silence()
        self.looks += 1
        self.steps += not (self.hung or self.paused)
        return web.json_response({"steps": self.steps, "paused": self.paused})

    async def abort(self, request: web.Request) -> web.Response:
        self.ended.setdefault((await request.json())["rid"], asyncio.Event()).set()
        return web.json_response({})

    async def silence(self) -> None:
        while self.dead:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def applied(self) -> PolicyApplied:
        return PolicyApplied(run=RUN, replica=self.name, url=self.url, pool=self.pool, serial=self.serial)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        app = web.Application()
        routes = [web.get("/health", self.health), web.get("/server_info", self.server_info)]
        routes += [web.post("/generate", self.generate), web.post("/abort_request", self.abort)]
        app.add_routes(routes)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        try:
            yield self
        finally:
            self.free.set()
            self.dead = False
            await runner.cleanup()


@dataclass
class Platform:
    state: Path
    chat: Compact
    bus: Bus
    objects: Objects
    pack: Ref
    counter: itertools.count[int] = field(default_factory=itertools.count)
    runs: Runs | None = None  # what the newest worker has heard of runs

    def repairs(self, prompt: list[int]) -> list[int]:
        """Repairs at the first try, tests, submits what passes."""
        chat = self.chat
        if prompt[-3:] == [chat.obs, chat.passed, chat.end]:
            return [chat.submit]
        return [chat.edit, chat.line_token(1), *chat.encode("-"), chat.got, *chat.encode("+"), chat.end, chat.test]

    def request(self, problem: str = "p1", **changes: Any) -> RolloutRequested:
        n = next(self.counter)
        key = AttemptKey(
            attempt=changes.pop("attempt", attempt_id(RUN, "g", n)),
            epoch=changes.pop("epoch", 0),
            group=f"g{n}",
            problem=problem,
            purpose=changes.pop("purpose", Purpose.train),
        )
        whole: dict[str, Any] = {
            "run": RUN,
            "key": key,
            "policy_floor": 0,
            "reward_config": "default",
            "sampling": Sampling(),
            "pack": self.pack,
            "pack_hidden": self.pack,
            **changes,
        }
        return RolloutRequested(**whole)

    async def ask(self, request: RolloutRequested) -> AttemptKey:
        await self.bus.publish(topics.ROLLOUTS_REQUESTED, request.key.attempt, request)
        return request.key

    async def announce(self, *engines: Engine) -> None:
        for engine in engines:
            await self.bus.publish(topics.POLICIES_APPLIED, engine.name, engine.applied())

    async def heard(
        self, topic: topics.Topic, count: int, until: Callable[[Any], bool] = lambda _: True, seconds: float = 30
    ) -> list[Any]:
        """The first `count` messages of a topic for which `until` holds, from its beginning."""
        found: list[Any] = []
        async with asyncio.timeout(patient(seconds)):
            async for delivery in self.bus.deliveries([topic], None, 64):
                delivery.done()
                if until(delivery.message):
                    found.append(delivery.message)
                if len(found) == count:
                    return found
        raise AssertionError

    async def knows(self, state: str) -> None:
        """Wait until the newest worker has heard that the run is `state`: running, held or finished."""
        await eventually(lambda: self.runs is not None and self.runs.state(RUN) == state, f"the run to be {state}")

    async def acknowledged(self, topic: topics.Topic, group: str) -> None:
        """Until the group has acknowledged all of the topic."""

        async def none_left() -> bool:
            return not sum((await self.bus.lag([topic], group)).values())

        await eventually(none_left, f"{group} to acknowledge {topic.name}")

    @contextlib.asynccontextmanager
    async def worker(self, name: str = "worker", **settings: Any) -> AsyncIterator[Health]:
        """The rollout service, until the block ends; then it drains."""
        quick = {"rollout_heartbeat_s": 0.1, "rollout_drain_s": 5.0}
        config = RolloutSettings(state=self.state, name=name, **{**quick, **settings})
        stop, before = asyncio.Event(), self.runs
        bus = buses.connect(config.bus_url, client=name)
        functions = sandbox.connect("process", 2)

        def listening(*arguments: Any) -> Worker:
            made = Worker(*arguments)
            self.runs = made.runs
            return made

        async with Health("rollout", config) as health:
            places = Places(functions=functions, objects=self.objects)
            serving = asyncio.create_task(serve(config, bus, self.objects, places, health, stop))
            try:
                with mock.patch.object(service, "Worker", listening):
                    await eventually(lambda: self.runs is not before or serving.done(), "the worker to begin")
                yield health
            finally:
                stop.set()
                await serving
                await functions.close()
                await bus.close()


@contextlib.asynccontextmanager
async def platform(state: Path, checkpoint: Path) -> AsyncIterator[Platform]:
    bus = buses.connect(f"sqlite:{state / 'bus.db'}", client="test")
    objects = stores.connect(f"file:{state / 'objects'}")
    pack = objects.put("pack", write(PROBLEMS))
    config = RunConfig(run=RUN, base=upload_directory(objects, "base", checkpoint), pack=pack, pack_hidden=pack)
    objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(config))
    chat = load_renderer(checkpoint)
    assert isinstance(chat, Compact)
    try:
        yield Platform(state, chat, bus, objects, pack)
    finally:
        await bus.close()
