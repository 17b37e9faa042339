"""The policies that an attempt by hand may have, each as a renderer and a model for the agent loop.

--scripted FILE            fixed replies
--policy DIRECTORY         a checkpoint: the embedded engine is started for it, and ended after
--policy URL               a replica of ours or a plain SGLang server (token ids), or a chat completions endpoint (text)
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.rollout.agent import Model
from services.rollout.byhand import endpoints
from services.rollout.byhand.builtin import BYTES_PER_TOKEN, builtin
from services.rollout.byhand.completions import Completions
from services.rollout.byhand.engine import Engine
from services.rollout.byhand.replica import started
from services.rollout.byhand.scripted import Scripted, read_script
from shared.renderers import Renderer
from shared.renderers.registry import UnknownFormat, known, load_renderer

Api = Literal["auto", "generate", "chat"]


class BadPolicy(ValueError):
    """The policy cannot be used; the text says what was found, what is allowed and the way out."""


@dataclass(frozen=True, slots=True)
class Policy:
    """`checkpoint`: the directory whose tokenizer and card the renderer was made of; None: the built-in format.
    `units_per_token`: tokens of the renderer for one token of an ordinary tokenizer. `caveat`: what a person must know of the
    trajectory; empty: nothing."""

    name: str
    renderer: Renderer
    model: Model
    checkpoint: Path | None = None
    trainable: bool = False
    versions_known: bool = False
    units_per_token: int = 1
    caveat: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """Return the unit that the renderer's tokens are counted in, for people: tokens, or bytes for the built-in format."""
        return "tokens" if self.units_per_token == 1 else "bytes"


@dataclass(frozen=True, slots=True)
class Wish:
    """The policy as the command line names it. An empty text or None: the option was not given."""

    policy: str = ""
    scripted: Path | None = None
    checkpoint: Path | None = None
    api: Api = "auto"
    model: str = ""
    key_variable: str = "OPENAI_API_KEY"
    temperature: float = 1.0
    seed: int | None = None


@asynccontextmanager
async def opened(wish: Wish, told: endpoints.Told) -> AsyncIterator[Policy]:
    """Open the policy, and close what was started for it. `told` is called with what takes a while. Raises BadPolicy, BadScript,
    endpoints.Unreachable, replica.NotStarted."""
    async with AsyncExitStack() as stack:
        if wish.scripted is not None:
            yield _scripted(wish)
        elif not wish.policy:
            raise BadPolicy(
                "found neither --policy nor --scripted; allowed: --policy URL, --policy CHECKPOINT or --scripted FILE"
            )
        elif "://" not in wish.policy:
            directory = Path(wish.policy)
            renderer = renderer_of(directory, "--policy")
            told(f"starting the embedded engine for {directory}")
            url = await stack.enter_async_context(started(directory))
            model = await stack.enter_async_context(_engine(url, renderer, wish))
            yield _exact(str(directory), renderer, model, directory, versions_known=True)  # it is version 0
        else:
            yield await _at_url(wish, stack)


def renderer_of(directory: Path, option: str) -> Renderer:
    """Return the renderer of a checkpoint directory. Raises BadPolicy."""
    if not (directory / "config.json").is_file():
        raise BadPolicy(
            f"{option} {directory}: found no config.json there; allowed: a checkpoint directory as `etude export` makes it, or a "
            "URL that begins with http://"
        )
    try:
        return load_renderer(directory)
    except UnknownFormat as error:
        raise BadPolicy(
            f"{option} {directory}: its chat format cannot be read: {error}; allowed: {', '.join(known())}. One that speaks it: "
            f"`etude import {directory} --name NAME --format FORMAT`, then `etude export checkpoints/NAME --out DIR`"
        ) from None
    except ValueError as error:
        raise BadPolicy(f"{option} {directory}: its chat format cannot be read: {error}") from None


def _scripted(wish: Wish) -> Policy:
    renderer = builtin() if wish.checkpoint is None else renderer_of(wish.checkpoint, "--checkpoint")
    assert wish.scripted is not None
    return Policy(
        f"scripted: {wish.scripted}",
        renderer,
        Scripted(read_script(wish.scripted), renderer),
        wish.checkpoint,
        units_per_token=BYTES_PER_TOKEN if wish.checkpoint is None else 1,
        caveat="A script wrote the replies, so the trajectory holds no training data.",
    )


async def _at_url(wish: Wish, stack: AsyncExitStack) -> Policy:
    url = wish.policy.rstrip("/")
    key = os.environ.get(wish.key_variable, "")
    found = await endpoints.look(url, wish.api, key)
    if found.api == "chat":
        name = wish.model or found.model
        if not name:
            raise BadPolicy(f"{url}: /models names no model; allowed: --model NAME")
        chat = Completions(found.url, name, key, builtin(), temperature=wish.temperature, seed=wish.seed)
        model = await stack.enter_async_context(chat)
        return Policy(
            f"{name} at {url}",
            model,
            model,
            units_per_token=BYTES_PER_TOKEN,
            caveat="A chat endpoint gives text without exact token ids, so the trajectory holds no training data.",
        )
    directory = wish.checkpoint or _on_this_machine(url, found.model)
    renderer = renderer_of(directory, "--checkpoint")
    engine = await stack.enter_async_context(_engine(url, renderer, wish))
    return _exact(url, renderer, engine, directory, versions_known=found.versioned)


def _on_this_machine(url: str, path: str) -> Path:
    if path and (Path(path) / "config.json").is_file():
        return Path(path)
    raise BadPolicy(
        f"{url}: it takes token ids, and its model directory {path!r} is not on this machine; allowed: --checkpoint DIRECTORY with "
        "the same model's tokenizer and etude.json, or --api chat to talk to it in text"
    )


def _engine(url: str, renderer: Renderer, wish: Wish) -> Engine:
    return Engine(url, renderer.stop_tokens, temperature=wish.temperature, seed=wish.seed)


def _exact(name: str, renderer: Renderer, model: Engine, directory: Path, *, versions_known: bool) -> Policy:
    caveat = (
        ""
        if versions_known
        else "The policy version is unknown and recorded as 0; ids and log-probabilities are exact."
    )
    return Policy(name, renderer, model, directory, trainable=True, versions_known=versions_known, caveat=caveat)
