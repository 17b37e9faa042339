"""`etude plan`: how many of each service a run needs, reckoned from what was measured. Pure arithmetic, and one table.

Invariants
- Everything is asked for at its mean rate, divided by USE: a service that is always busy makes everything behind it wait.
- What cannot be reckoned (how fast an engine samples, a trainer trains, tests run) is asked for. The defaults are of the
  demo's order of magnitude, one CPU core each; they are no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

USE = 0.8  # the share of its time that a service is meant to be busy
MESSAGES = 6  # on the bus for an attempt: requested, claimed, heartbeat, finished, scored, its share of the rest
BYTES_PER_TOKEN = 16  # id, log-probability, version, mask, before compression
MAY_BE_NOTHING = ("tool_seconds", "test_seconds", "routed")
DELTA_SHARE = 0.2  # of a whole file, at the demo's learning rate; 0.01 where few weights move (docs/weights.md)


@dataclass(frozen=True, slots=True)
class Load:
    """What a run asks for, and what one of each was measured to do. Times in seconds."""

    step_seconds: float = 4.0  # wanted, from one update to the next
    groups_per_step: int = 16
    group_size: int = 8
    sampled_tokens: float = 50.0  # of an attempt
    trained_tokens: float = 110.0  # of an attempt, prompt and answers of tools too, shared prefixes counted once
    turns: float = 3.0
    tool_seconds: float = 0.05  # of a turn: visible tests, shell
    test_seconds: float = 0.01  # of an attempt: hidden tests
    session_speed: float = 100.0  # tokens a second of one attempt, alone among others on a busy engine
    engine_speed: float = 4000.0  # tokens a second of one replica, all its attempts together
    trainer_speed: float = 5000.0  # tokens a second of one device
    concurrency: int = 64  # attempts in hand of one rollout worker (ETUDE_ROLLOUT_CONCURRENCY)
    parameters: float = 2.7e6
    routed: int = 12  # MoE layers x experts per token: a byte each and sampled token
    base_every: int = 25

    def __post_init__(self) -> None:
        """Raises ValueError that names the field as the command's option."""
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            fine = value > 0 or (value == 0 and name in MAY_BE_NOTHING)
            if not (fine and math.isfinite(value)):
                allowed = "at least 0" if name in MAY_BE_NOTHING else "above 0"
                raise ValueError(f"--{name.replace('_', '-')}: found {value:g}; allowed: {allowed}")


class Row(NamedTuple):
    what: str
    number: str
    because: str


def in_flight(load: Load) -> tuple[float, float, float]:
    """(attempts a second, seconds of an attempt, attempts in flight: Little's law)."""
    rate = load.groups_per_step * load.group_size / load.step_seconds
    lasts = load.sampled_tokens / load.session_speed + load.turns * load.tool_seconds
    return rate, lasts, rate * lasts


def staleness(load: Load) -> int:
    """The least `max_staleness` with which the gate does not hold the run up: (max_staleness + 1) steps' attempts must hold
    those in flight and the step that is being trained (services/scheduler/gate.py)."""
    return max(1, math.ceil(in_flight(load)[2] / (load.groups_per_step * load.group_size)))


def needed(demand: float, each: float) -> int:
    """How many that do `each` a second, busy for USE of their time."""
    return max(1, math.ceil(demand / each / USE - 1e-9))


def plan(load: Load) -> list[Row]:
    rate, lasts, flying = in_flight(load)
    sampled = rate * load.sampled_tokens
    trained = rate * load.trained_tokens
    a_day = 86_400 * rate
    attempts_gb = a_day * (load.trained_tokens * BYTES_PER_TOKEN + load.sampled_tokens * load.routed) / 1e9
    share = DELTA_SHARE + 1 / load.base_every
    weights_gb = 86_400 / load.step_seconds * load.parameters * 2 * share / 1e9
    return [
        Row("inference replicas", str(needed(sampled, load.engine_speed)), f"{sampled:,.0f} tokens/s sampled"),
        Row("rollout workers", str(needed(flying, load.concurrency)), f"{flying:,.0f} attempts in flight, {lasts:.2g} s each"),
        Row("graders", str(needed(rate * load.test_seconds, 1.0)), f"{rate:,.3g} attempts/s, {load.test_seconds:g} s of tests"),
        Row("trainer devices", str(needed(trained, load.trainer_speed)), f"{trained:,.0f} tokens/s trained"),
        Row("reward, scheduler, curator", "1 each", "a second scheduler stands by"),
        Row("max_staleness", str(staleness(load)), "least with which the gate does not hold the run up"),
        Row("Kafka", f"{MESSAGES * rate:,.0f} messages/s", f"{MESSAGES} for an attempt"),
        Row("object store, attempts", f"{attempts_gb:,.3g} GB a day", "before compression; what was given up goes by itself"),
        Row("object store, weights", f"{weights_gb:,.3g} GB a day", f"deltas of {DELTA_SHARE:.0%}, a base every {load.base_every}"),
    ]  # fmt: skip
