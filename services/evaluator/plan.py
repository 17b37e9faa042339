"""An evaluation as a state machine: which attempts it consists of, which are out, what came back. Pure, no clock.

Invariants:
- A place (problem, index) gets one result, the first; later ones change nothing.
- At most `in_flight` attempts are out at a time, in the order of the problems, so that the attempts of one problem run
  together and their prompt is computed once.
- Silence is no failure: an attempt whose worker fell silent is asked for again as often as needed. Reported failures of
  the infrastructure are counted, and `asks` of them end the place with an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import xxhash

from shared.contracts.ids import attempt_id
from shared.contracts.messages import AttemptKey, EvalRequested, RolloutRequested, RolloutScored
from shared.contracts.run import Purpose, Ref, Sampling

FIRST_PAUSE_S = 2.0  # before an attempt that failed is asked for again; doubles


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one place. `error`: infrastructure failed for good, there is no verdict."""

    attempt: str
    problem: str
    index: int
    solved: bool = False
    first_edit: bool = False
    tokens: int = 0  # sampled
    stop: str = ""
    trajectory: Ref | None = None
    error: str = ""


def choose(problems: Iterable[str], count: int, salt: str = "") -> list[str]:
    """`count` of the problems (0: all), always the same ones of a pack, whatever its order."""
    ids = sorted(problems, key=lambda p: xxhash.xxh3_64_intdigest(f"{salt}|{p}".encode()))
    return sorted(ids[:count] if count else ids)


def group_of(request: EvalRequested, problem: str) -> str:
    return "e-" + xxhash.xxh3_128_hexdigest(f"{request.run}|{request.eval}|{problem}".encode())[:16]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds of silence after which an attempt counts as lost. `lease_s`: while a worker holds it, heartbeats come every
    few seconds. `lost_s`: while it waits for a worker or for its verdict; there the bus loses nothing, and queues are long.
    `asks`: attempts that infrastructure failed before the place ends with an error."""

    lease_s: float
    lost_s: float
    asks: int


@dataclass(slots=True)
class _Place:
    problem: str
    index: int
    group: str
    epoch: int = -1  # not asked for yet
    heard_at: float = 0.0  # asked for, claimed, heartbeat, finished
    held: bool = False  # by a worker
    not_before: float = 0.0
    failures: int = 0


class Plan:
    """`greedy` is the place with the index `samples`, at temperature 0. Times are seconds on the caller's clock."""

    def __init__(self, request: EvalRequested, problems: list[str], reward_config: str, patience: Patience) -> None:
        self.request = request
        self.problems = problems
        self.results: dict[str, Result] = {}
        self._reward_config = reward_config
        self._patience = patience
        self._places: dict[str, _Place] = {}
        for problem in problems:
            group = group_of(request, problem)
            for index in range(request.samples + int(request.greedy)):
                self._places[attempt_id(request.run, group, index)] = _Place(problem, index, group)
        self._waiting: deque[str] = deque(self._places)
        self._out: dict[str, None] = {}  # asked for, in the order of asking

    @property
    def total(self) -> int:
        return len(self._places)

    @property
    def out(self) -> int:
        """Attempts that were asked for and not answered."""
        return len(self._out)

    @property
    def complete(self) -> bool:
        return len(self.results) == len(self._places)

    def knows(self, attempt: str) -> bool:
        return attempt in self._places

    def restore(self, results: Iterable[Result]) -> None:
        """What was durable before a restart."""
        for result in results:
            self._settle(result)

    def due(self, now: float, in_flight: int) -> Iterator[RolloutRequested]:
        """Attempts to ask for now, marked as asked for; first those that were lost."""
        lost = [attempt for attempt in self._out if self._is_lost(self._places[attempt], now)]
        for attempt in lost:
            del self._out[attempt]
        self._waiting.extendleft(reversed(lost))
        for _ in range(len(self._waiting)):
            if len(self._out) >= in_flight:
                return
            attempt = self._waiting.popleft()
            if attempt in self.results:
                continue
            place = self._places[attempt]
            if now < place.not_before:
                self._waiting.append(attempt)
                continue
            place.epoch += 1
            place.heard_at, place.held = now, False
            self._out[attempt] = None
            yield self._ask(attempt, place)

    def progress(self, attempt: str, epoch: int, now: float, *, held: bool) -> None:
        """A worker has claimed it or still holds it; `held=False`: it is finished and waits for its verdict."""
        place = self._places.get(attempt)
        if place is not None and epoch == place.epoch:
            place.heard_at, place.held = now, held

    def scored(self, message: RolloutScored) -> Result | None:
        """The result to make durable, or None: the place has one, or is none of this evaluation."""
        attempt = message.key.attempt
        if attempt in self.results or (place := self._places.get(attempt)) is None:
            return None
        result = Result(
            attempt=attempt,
            problem=place.problem,
            index=place.index,
            solved=message.verdict.solved,
            first_edit=bool(message.verdict.first_edit_solved),  # None: there was no edit
            tokens=message.effort.sampled_tokens,
            stop=message.stop,
            trajectory=message.trajectory,
        )
        self._settle(result)
        return result

    def failed(self, key: AttemptKey, reason: str, now: float) -> Result | None:
        """Infrastructure failed: asked for again after a pause; the result when it failed too often."""
        attempt = key.attempt
        if attempt in self.results or (place := self._places.get(attempt)) is None or key.epoch < place.epoch:
            return None
        if attempt not in self._out:
            return None  # said twice
        del self._out[attempt]
        place.failures += 1
        if place.failures >= self._patience.asks:
            result = Result(attempt=attempt, problem=place.problem, index=place.index, error=reason)
            self._settle(result)
            return result
        place.not_before = now + FIRST_PAUSE_S * 2 ** (place.failures - 1)
        self._waiting.append(attempt)
        return None

    def _is_lost(self, place: _Place, now: float) -> bool:
        return now - place.heard_at >= (self._patience.lease_s if place.held else self._patience.lost_s)

    def _settle(self, result: Result) -> None:
        if result.attempt in self._places:
            self.results.setdefault(result.attempt, result)
            self._out.pop(result.attempt, None)

    def _ask(self, attempt: str, place: _Place) -> RolloutRequested:
        request = self.request
        sampling: Sampling = request.sampling
        if place.index == request.samples:
            # Nothing is drawn: a fresh retry says the same once more, so it must use up a turn.
            repeats = 0 if sampling.retry == "fresh" else sampling.max_repeats
            sampling = msgspec.structs.replace(sampling, temperature=0.0, max_repeats=repeats)
        return RolloutRequested(
            run=request.run,
            key=AttemptKey(
                attempt=attempt,
                epoch=place.epoch,
                group=place.group,
                problem=place.problem,
                index=place.index,
                purpose=Purpose.evaluate,
            ),
            policy_floor=request.serial,
            pinned=request.serial,
            reward_config=self._reward_config,
            sampling=sampling,
            pack=request.pack,
            pack_hidden=request.pack_hidden,
            seed=int(xxhash.xxh3_64_intdigest(attempt.encode()) >> 33),
        )
