"""Problems of one's own are run before anything counts on them: by the same check as the admission of a run, on this machine."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from etude.demo.background import wanted
from shared.environments import Outcome
from shared.environments.admitting import admitted
from shared.environments.places import places_of_files
from shared.environments.progress import shown
from shared.environments.registry import Environments
from shared.renderers import Renderer
from shared.renderers.fitting import Fitting, gated
from shared.settings import ServiceSettings, read

BATCH = 64  # problems of a cheap kind between two steps of the progress
SANDBOXES = 2  # as many as an admission runs, whatever cores a container sees: what passes here passes there


class SandboxSettings(ServiceSettings):
    sandbox: Literal["bubblewrap", "docker", "kubernetes", "process"] = Field(
        "bubblewrap",
        description="Where problems are checked; docker, kubernetes: repositories alone; process: functions, "
        "only for code that you trust.",
    )


def checked(path: Path, fitting: Fitting, chat: Renderer) -> Fitting:
    """Those of the file that its solution solves and its broken state does not, as far as there is a solution. Raises
    SandboxUnavailable, ProblemError where none is left."""
    return gated(path, fitting, _outcomes(path, fitting.pairs), chat)


def _outcomes(path: Path, pairs: Sequence[tuple[Any, Any]]) -> list[Outcome]:
    """Return them in the order of the problems, each by its kind's own gate. Raises KeyboardInterrupt soon after whoever waits for
    this work was cancelled; the sandboxes are closed then."""
    settings = read(SandboxSettings)
    with shown(str(path), len(pairs)) as progress:

        async def run() -> list[Outcome]:
            async with places_of_files(settings, SANDBOXES, settings.sandbox) as places:
                return await wanted(admitted(Environments(places), pairs, progress, BATCH))

        def work() -> list[Outcome]:
            return asyncio.run(run())

        with ThreadPoolExecutor(1) as other:  # the caller may run an event loop of its own
            return other.submit(contextvars.copy_context().run, work).result()
