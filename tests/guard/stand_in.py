"""The stand-in for the engine: `/generate` over HTTP, answered by each attempt's seeded policy.

A completion depends on the attempt, on how many generations the attempt had before and on what the request says. It never
depends on which request came first, nor on the random part of a request's id.
"""

from __future__ import annotations

import base64
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash
from aiohttp import web

from shared.contracts.messages import PolicyApplied, RolloutRequested
from tests.guard.compact import EXPERTS, LAYERS, TOP_K, Writer
from tests.guard.policy import Policy
from tests.guard.problems import Pair
from tests.guard.requests import FLOOR, MOE, SERIAL
from tests.integration.rollout_platform import Engine


def rng_of(*facts: object) -> random.Random:
    return random.Random(xxhash.xxh3_128_intdigest(msgspec.json.encode(facts)))


@dataclass
class StandIn(Engine):
    """One replica, for one run. `requests_by` names every attempt that it may be asked for."""

    policy: Any = None  # one per attempt, see `policies`
    run: str = ""
    serial: int = SERIAL
    policies: dict[str, Policy] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    requests_by: dict[str, RolloutRequested] = field(default_factory=dict)
    seed: int = 0

    def applied(self) -> PolicyApplied:
        return PolicyApplied(run=self.run, replica=self.name, url=self.url, pool="rollout", serial=self.serial)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        attempt = body["rid"].split(".")[0]  # <attempt>.<epoch>-<nonce>.<number>
        if attempt not in self.policies:
            return web.json_response({"error": f"rid {body['rid']}: no attempt of the guard's"}, status=400)
        self.asked[attempt] += 1
        return web.json_response(self.answer(attempt, self.asked[attempt], body))

    def answer(self, attempt: str, number: int, body: dict[str, Any]) -> dict[str, Any]:
        context, sampling = body["input_ids"], body["sampling_params"]
        room, first_row = sampling["max_new_tokens"], body.get("routed_experts_start_len")
        seeded = "sampling_seed" in sampling  # its value changes when a busy machine makes the worker ask twice
        stops = sorted(sampling["stop_token_ids"])
        rng = rng_of(self.seed, attempt, number, context, room, sampling["temperature"], stops, seeded, first_row)
        completion = self.policies[attempt].complete(context, room, rng)
        n = len(completion.tokens)
        pinned = self.requests_by[attempt].pinned is not None
        old = SERIAL if pinned else rng.randint(FLOOR, SERIAL)
        swap = rng.randint(0, n) if old < SERIAL else 0  # tokens from here on are the newest version's
        meta: dict[str, Any] = {
            # Multiples of 1/64 are exact in float32 and in JSON.
            "output_token_logprobs": [[-rng.randrange(512) / 64, token, None] for token in completion.tokens],
            "weight_version": str(SERIAL),
            "weight_versions": [
                {"version": str(version), "start": start, "end": end}
                for version, start, end in ((old, 0, swap), (SERIAL, swap, n))
                if start < end
            ],
            "oldest_kv_version": min(old, rng.randint(FLOOR - 1, SERIAL)),
            "extra_key": body.get("extra_key", f"@{SERIAL}"),
            "finish_reason": {"type": completion.finish},
        }
        if first_row is not None:
            meta["routed_experts"] = _routing(context + completion.tokens, first_row, rng.randrange(EXPERTS))
        return {"output_ids": completion.tokens, "meta_info": meta}


def _routing(sequence: list[int], first: int, shift: int) -> str:
    """base64 of int32 [len - 1 - first, LAYERS, TOP_K]. `shift` differs by generation: rows that were recorded must stay."""
    rows = bytearray()
    for at in range(first, len(sequence) - 1):
        for layer in range(LAYERS):
            for k in range(TOP_K):
                rows += ((sequence[at] + at + layer + k + shift) % EXPERTS).to_bytes(4, "little")
    return base64.b64encode(rows).decode()


def stand_ins(
    writer: Writer, pairs: Mapping[str, Pair], requests: list[RolloutRequested], seed: int
) -> tuple[StandIn, StandIn]:
    """One replica for the dense run and one for the MoE run, with the policies of their attempts."""
    made = {}
    for run in sorted({MOE, *(one.run for one in requests)}):
        mine = {one.key.attempt: one for one in requests if one.run == run}
        policies = {
            attempt: Policy(writer, pairs[one.key.problem], rng_of(seed, attempt)) for attempt, one in mine.items()
        }
        made[run] = StandIn(run=run, name=f"engine-{run}", policies=policies, requests_by=mine, seed=seed)
    return tuple(made.values())  # type: ignore[return-value]
