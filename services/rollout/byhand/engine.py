"""A model that samples by SGLang's `/generate`: exact token ids and log-probabilities."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

from services.rollout.engine_client import EngineBusy, EngineClient, EngineRefused, EngineUnavailable, Request
from services.rollout.generation import Generation
from shared.environments import InfrastructureError

PROBE_S = 5.0
TRIES = 5  # of one generation; a person waits
FIRST_DELAY_S = 0.5


@dataclass(slots=True)
class Engine:
    """Implements services.rollout.agent.Model. Use as an async context manager. Routed experts are not asked for: nothing is
    trained from here."""

    url: str
    stop_tokens: tuple[int, ...]
    temperature: float
    seed: int | None
    client: EngineClient = field(default_factory=lambda: EngineClient(probe_s=PROBE_S))
    cache_key: str | None = None
    requests: int = 0
    name: str = field(default_factory=lambda: f"by-hand-{secrets.token_hex(4)}")

    async def __aenter__(self) -> Engine:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.__aexit__(*exc)

    @property
    def partial(self) -> Generation | None:
        return None

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        delay = FIRST_DELAY_S
        for left in reversed(range(TRIES)):
            try:
                generation = await self.client.generate(
                    self.url, self._request(tokens, max_new_tokens), None, versioned=False
                )
                if generation.finish == "abort":
                    raise EngineUnavailable("the generation was aborted", broke=True)
            except EngineRefused as error:
                raise InfrastructureError(f"the policy refused the request: {error}") from None
            except (EngineUnavailable, EngineBusy) as error:
                if not left:
                    raise InfrastructureError(f"the policy does not answer: {error}") from None
                await asyncio.sleep(error.retry_after_s if isinstance(error, EngineBusy) else delay)
                delay *= 2
            else:
                self.cache_key = generation.cache_key
                return generation
        raise AssertionError("unreachable")

    def _request(self, tokens: list[int], most: int) -> Request:
        self.requests += 1
        return Request(
            rid=f"{self.name}.{self.requests}",
            tokens=tokens,
            temperature=self.temperature,
            max_new_tokens=most,
            stop_token_ids=self.stop_tokens,
            cache_key=self.cache_key,
            first_row=0,
            seed=None if self.seed is None else self.seed + self.requests,
        )
