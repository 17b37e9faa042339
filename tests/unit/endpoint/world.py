"""A scripted policy behind the recording endpoint, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.rollout.endpoint.recording import Recording
from services.rollout.endpoint.server import Endpoint
from services.rollout.generation import Generation
from shared.chat.writing import written
from shared.environments import Limits
from shared.renderers.chat import Chat
from shared.renderers.registry import load_renderer
from tests.renderer_checkpoints import checkpoint

CONTEXT = 4096
Said = str | tuple[str, list[tuple[str, dict[str, Any]]]]


@dataclass
class Policy:
    """Plays replies in order, again from the first after the last. `seen`: each request's ids, and what was sampled for it.
    `free`: while clear, generations wait."""

    renderer: Chat
    replies: list[Said]
    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)
    free: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0
    before: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self.free.set()

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        reply = self.replies[len(self.seen) % len(self.replies)]
        text, calls = (reply, []) if isinstance(reply, str) else reply
        full = written(self.renderer, text, calls, shielded=False)
        sampled = full[:max_new_tokens]
        self.seen.append((list(tokens), sampled))
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        n, rows = len(sampled), len(tokens) + len(sampled) - 1 - first_row
        return Generation(
            tokens=sampled,
            logprobs_N=np.full(n, -0.5, np.float32),
            versions_N=np.full(n, 1, np.int32),
            oldest_kv_version=1,
            experts_RLK=np.zeros((rows, 1, 1), np.uint8),
            finish="stop" if len(sampled) == len(full) else "length",
        )


def renderer(folder: Path, family: str = "qwen2_5", card: dict[str, Any] | None = None) -> Chat:
    made = load_renderer(checkpoint(folder, family, card or {"format": "chatml", "context": CONTEXT}))
    assert isinstance(made, Chat)
    return made


def recording(chat: Chat, replies: Iterable[Said], **limits: Any) -> tuple[Recording, Policy]:
    policy = Policy(chat, list(replies))
    return Recording(chat, policy, Limits(**{"turns": 100, "tokens": 100_000, **limits}), 1.0, run="r-test"), policy


@contextlib.asynccontextmanager
async def served(*recordings: Recording) -> AsyncIterator[str]:
    endpoint = Endpoint()
    async with contextlib.AsyncExitStack() as open_:
        for one in recordings:
            open_.enter_context(endpoint.attempt(one))
        yield await open_.enter_async_context(endpoint.listening("127.0.0.1", 0))


def require_exact(recorded: Recording, policy: Policy) -> None:
    """Every id that the engine saw or sampled is recorded, and trained once."""
    segments = recorded.tree.recorder().segments()
    for prompt, sampled in policy.seen:
        whole = [*prompt, *sampled]
        assert any(segment.tokens.tolist()[: len(whole)] == whole for segment in segments)
    trained = sorted(id for segment in segments for id in segment.tokens[segment.loss_mask].tolist())
    assert trained == sorted(id for _, sampled in policy.seen for id in sampled)
