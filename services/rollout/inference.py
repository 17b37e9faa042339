"""The model as the agent sees it: generations that survive the death of an engine. Waits rather than fails.

Invariants:
- A generation that an engine lost is asked for again, here or elsewhere, from exactly the tokens recorded so far.
- Tokens that an engine sampled before it ended a generation early stay: the next request continues behind them. A generation that
  this worker ends (a deadline, a worker that leaves) keeps what the engine says within SALVAGE_S (`Session.partial`).
- Every sampled token that is handed out comes from a version that the attempt accepts (floor or pin). A replica out of rotation
  is asked for none of an older version than the attempt's first.
- A pinned attempt whose version nobody serves gives its place in the worker back while it waits (`lend`).
- While no replica is usable, the service says within a second that it waits on "inference".
- What a replica is working on is waited for, however long it takes: a generation is given up only where its replica is silent
  or stands still unasked. Neither a long answer, a queue nor a pause is either.
- A replica that is overloaded is none that is lost: its requests go to others, or wait as long as it asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog
import xxhash

from services.rollout import metrics
from services.rollout.engine_client import EngineBusy, EngineClient, EngineRefused, EngineUnavailable, Request
from services.rollout.fleet import Fleet, Replica, Wanted
from services.rollout.generation import Generation, RoutingShape
from services.rollout.turn import Turn
from shared.contracts.messages import PolicyApplied
from shared.environments import InfrastructureError
from shared.telemetry import Health
from shared.telemetry_spans import span

# A stopped engine goes unnoticed for the sum of these three and the client's UNREAD_S at most: 0.9 s. One that works has the last
# two, 0.6 s, for its answer.
SILENT_S = 0.2  # who has answered anything since is not probed
LOOK_EVERY_S = 0.1
PROBE_S = 0.5
STALL_S = 10.0  # a request at a replica that fell silent is given up after so long, if another replica can serve it
SALVAGE_S = 2.0  # an engine that is told to end a generation has so long to say what it has sampled
MAX_BROKE = 8  # answers that are failures, for one generation; more is a defect that waiting does not mend
FIRST_DELAY_S, LAST_DELAY_S = 0.1, 5.0
Lend = Callable[[], contextlib.AbstractAsyncContextManager[None]]
JITTER = 1.5  # up to so many times what an overloaded engine asks for: not all come back at once

log = structlog.get_logger()


class Inference:
    """All replicas. `run` probes them for as long as the service lives."""

    def __init__(self, client: EngineClient, health: Health, *, pin_wait_s: float, generate_s: float) -> None:
        self.client = client
        self.fleet = Fleet()
        self.pin_wait_s = pin_wait_s
        self.generate_s = generate_s
        self._health = health
        self._changed = asyncio.Event()
        self._aborts: set[asyncio.Task[None]] = set()
        # Pinned versions that no replica serves: since when, and when somebody looked last.
        self._missing: dict[tuple[str, int | None], tuple[float, float]] = {}
        self._health.wait_on("inference")

    def apply(self, message: PolicyApplied) -> None:
        self.fleet.apply(message, time.monotonic())
        self._tell()

    async def run(self) -> None:
        """Probes replicas that have been silent; those that answer requests need no probe."""
        async with asyncio.TaskGroup() as probes:
            while True:
                self.fleet.forget(time.monotonic())
                for replica in self.fleet.to_probe(time.monotonic(), SILENT_S):
                    replica.probe.running = True
                    probes.create_task(self._probe(replica))
                self._say()
                await asyncio.sleep(LOOK_EVERY_S)

    async def _probe(self, replica: Replica) -> None:
        started = time.monotonic()
        alive = await self.client.alive(replica.url)
        replica.probe.answered(alive, time.monotonic())
        if alive:
            self._heard(replica)
        elif replica.last_answer < started:  # no answer to anything else contradicts it
            self.lost(replica)

    def answered(self, replica: Replica) -> None:
        replica.circuit.succeeded()
        self._heard(replica)

    def lost(self, replica: Replica) -> None:
        if replica.alive:
            log.warning("engine_lost", replica=replica.name, url=replica.url)
            replica.alive = False
            self._tell()

    def lives(self, replica: Replica) -> bool:
        """Whether it answers; one that was replaced or forgotten is asked no more."""
        return replica.alive and self.fleet.replicas.get(replica.name) is replica

    def abort(self, replica: Replica, rid: str) -> None:
        task = asyncio.create_task(self.client.abort(replica.url, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def replica(self, wanted: Wanted, stay: str, lend: Lend = contextlib.nullcontext) -> Replica:
        """Waits for a replica that may serve, and is to be asked now. `lend`: entered while a pinned version is waited for. Raises
        InfrastructureError where replicas work, but none has served the pinned version for `pin_wait_s`: it may never come
        back."""
        while (chosen := self.fleet.choose(wanted, time.monotonic(), stay)) is None:
            if wanted.pinned is None:
                await self._look_again()
            else:
                async with lend():
                    await self._pinned(wanted, stay)
        self._missing.pop((wanted.run, wanted.pinned), None)
        chosen.circuit.sent(time.monotonic())
        return chosen

    async def _pinned(self, wanted: Wanted, stay: str) -> None:
        """Returns when there is a replica for it. Raises InfrastructureError, as `replica`."""
        while self.fleet.choose(wanted, now := time.monotonic(), stay) is None:
            if (missing_s := self._missing_s(wanted, now)) > self.pin_wait_s:
                raise InfrastructureError(f"no replica served version {wanted.pinned} for {missing_s:.0f} s")
            await self._look_again()

    async def _look_again(self) -> None:
        with contextlib.suppress(TimeoutError):  # a circuit closes by time alone: look again now and then
            async with asyncio.timeout(0.5):
                await self._changed.wait()

    def _missing_s(self, wanted: Wanted, now: float) -> float:
        """How long the pinned version was missing while others worked, as those who wait for it saw, all together: one after
        another need not. An outage of all says nothing of this version, nor does an absence of long ago."""
        key = (wanted.run, wanted.pinned)
        if not self.fleet.any_usable(now):
            self._missing.pop(key, None)
            return 0.0
        since, looked = self._missing.get(key, (now, now))
        if now - looked > self.pin_wait_s + 1.0:  # who waits looks twice a second
            since = now
        self._missing[key] = since, now
        return now - since

    async def overloaded(self, replica: Replica, retry_after_s: float, wanted: Wanted) -> None:
        """It has no room. Returns at once where another one may have, else when it may be asked again."""
        now, rest = time.monotonic(), retry_after_s * random.uniform(1.0, JITTER)
        replica.saturated_until = max(replica.saturated_until, now + rest)
        other = self.fleet.choose(wanted, now)
        if other is None or other.saturated(now):
            await asyncio.sleep(rest)

    def _heard(self, replica: Replica) -> None:
        replica.last_answer = time.monotonic()
        if not replica.alive:  # back, perhaps as a new process: what the old one did counts no more
            replica.alive = True
            replica.circuit.succeeded()
            replica.saturated_until = float("-inf")
            self._tell()

    def _tell(self) -> None:
        self._say()
        self._changed.set()
        self._changed = asyncio.Event()

    def _say(self) -> None:
        if self.fleet.any_usable(time.monotonic()):
            self._health.clear("inference")
        else:
            self._health.wait_on("inference")


@dataclass(slots=True)
class Session:
    """One attempt's conversation with the fleet; implements services.rollout.agent.Model."""

    inference: Inference
    attempt: str  # with its epoch: unique among what engines see
    wanted: Wanted
    temperature: float
    stop_tokens: tuple[int, ...]
    routing: RoutingShape | None
    seed: int = 0  # 0: whatever the engine draws
    replica: str = ""
    cache_key: str | None = None
    requests: int = 0
    begun: Generation | None = None  # what is sampled of the next generation already; None: nothing
    partial: Generation | None = None  # what is left of the generation that was cancelled last; None: nothing
    lend: Lend = contextlib.nullcontext  # gives the attempt's place back while it waits for its pinned version
    nonce: str = field(default_factory=lambda: secrets.token_hex(2))  # a dead worker's requests may still run there

    async def served(self) -> None:
        """Returns at once where any version will do, else when the pinned one is served. Raises as `Inference.replica`."""
        if self.wanted.pinned is not None:
            await self.inference.replica(self.wanted, self.replica, self.lend)

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        with span("generate", kind="client", context_tokens=len(tokens)) as said:
            generation = await self._generate(tokens, max_new_tokens, first_row)
            said.note(replica=self.replica, tokens=len(generation.tokens), cached_tokens=generation.cached_tokens)
            return generation

    async def _generate(self, tokens: list[int], max_new_tokens: int, first_row: int) -> Generation:
        turn = Turn(tokens, max_new_tokens, first_row, self.stop_tokens, self.routing is not None, self.begun)
        self.begun = self.partial = None
        try:
            return await self._sample(turn)
        except asyncio.CancelledError:
            self.partial = turn.kept()
            lost = len(turn.context) - len(tokens) - (0 if self.partial is None else len(self.partial.tokens))
            metrics.UNRECORDED.labels(self.wanted.run, "routing").inc(lost)
            raise

    async def _sample(self, turn: Turn) -> Generation:
        started, broke, delay = time.monotonic(), 0, FIRST_DELAY_S
        while (whole := turn.whole) is None:
            replica = await self.inference.replica(self.wanted, self.replica, self.lend)
            if replica.name != self.replica:
                # Begun, or begun again elsewhere: of what version its KV is, is said there.
                self.replica, self.cache_key = replica.name, None
            try:
                generation = await self._ask(replica, self._request(turn), turn)
            except EngineRefused as error:
                raise InfrastructureError(str(error)) from None
            except EngineBusy as error:
                metrics.ENGINE_RETRIES.labels(self.wanted.run).inc()
                await self.inference.overloaded(replica, error.retry_after_s, self.wanted)
                continue
            except EngineUnavailable as error:
                if (told := turn.told()) is not None:
                    self._take(turn, replica, told)
                metrics.ENGINE_RETRIES.labels(self.wanted.run).inc()
                if not error.blameless:
                    replica.circuit.failed(time.monotonic())
                broke += error.broke
                if broke >= MAX_BROKE:
                    raise InfrastructureError(f"{broke} failures of one generation, the last: {error}") from None
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(LAST_DELAY_S, delay * 2)
                continue
            self.inference.answered(replica)
            if self._take(turn, replica, generation) and generation.finish == "abort":
                metrics.ENGINE_RETRIES.labels(self.wanted.run).inc()
        metrics.ENGINE_SECONDS.labels(self.wanted.run).inc(time.monotonic() - started)
        return whole

    def _request(self, turn: Turn) -> Request:
        """Return the request for what is still to be sampled."""
        self.requests += 1
        return Request(
            rid=f"{self.attempt}-{self.nonce}.{self.requests}",
            tokens=turn.context,
            temperature=self.temperature,
            max_new_tokens=turn.left,
            stop_token_ids=self.stop_tokens,
            cache_key=self.cache_key,
            first_row=turn.next_row,
            seed=self._seed(),
        )

    def _take(self, turn: Turn, replica: Replica, generation: Generation) -> bool:
        """Keep what was sampled, unless it is of a version that the attempt does not accept: then return False."""
        oldest, newest = int(generation.versions_N.min()), int(generation.versions_N.max())
        if not (self.wanted.accepts(oldest) and self.wanted.accepts(newest)):
            replica.serial = newest  # it serves something else than it said: started again, or swapped meanwhile
            metrics.UNRECORDED.labels(self.wanted.run, "version").inc(len(generation.tokens))
            return False
        replica.serial = max(replica.serial, newest)
        if self.wanted.first < 0:
            self.wanted = replace(self.wanted, first=oldest)
        self.cache_key = generation.cache_key
        turn.take(generation)
        metrics.SAMPLED.labels(self.wanted.run).inc(len(generation.tokens))
        return True

    def _seed(self) -> int | None:
        """Differs between the attempts of a group and between their generations, whatever the request's seed."""
        if self.seed == 0:
            return None
        return xxhash.xxh3_64_intdigest(f"{self.seed}|{self.attempt}|{self.requests}".encode()) >> 33

    async def _ask(self, replica: Replica, request: Request, turn: Turn) -> Generation:
        """One request. Given up when its replica has been silent for STALL_S and another one could serve, and when it answers,
        but makes no step for `generate_s` without having been told to stand still."""
        inference, url = self.inference, replica.url
        look_every_s = inference.generate_s / 2  # two looks that see the same
        looked, steps = time.monotonic(), None
        turn.heard = None
        asking = asyncio.create_task(inference.client.generate(url, request, self.routing, heard=turn.hear))
        try:
            while not (await asyncio.wait({asking}, timeout=min(STALL_S, look_every_s)))[0]:
                now = time.monotonic()
                if not inference.lives(replica):
                    looked, steps = now, None  # it may come back to where it was
                    if now - replica.last_answer > STALL_S and inference.fleet.choose(self.wanted, now) is not None:
                        raise EngineUnavailable(f"{url}: silent for {STALL_S:.0f} s")
                elif now - looked >= look_every_s:
                    before, looked = steps, now
                    steps = await inference.client.steps(url)
                    if steps is not None and steps == before and not asking.done():
                        raise EngineUnavailable(f"{url}: answers, but made no step for {look_every_s:g} s")
            return asking.result()
        except asyncio.CancelledError:
            await self._salvage(replica, request, asking, turn)
            raise
        finally:
            if not asking.done():
                asking.cancel()
                inference.abort(replica, request.rid)

    async def _salvage(self, replica: Replica, request: Request, asking: asyncio.Task[Generation], turn: Turn) -> None:
        """End a generation at its engine, and keep what it has sampled: all if it says so within SALVAGE_S, else what it told."""
        if not asking.done() and self.inference.lives(replica):
            self.inference.abort(replica, request.rid)
            await asyncio.wait({asking}, timeout=SALVAGE_S)
        said = asking.done() and not asking.cancelled() and asking.exception() is None
        last = asking.result() if said else turn.told()
        if last is not None:
            self._take(turn, replica, last)
