"""Problems of one's own are run before anything counts on them: by the same check as the admission of a run, on this machine."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from etude.demo.background import require_wanted
from shared.environments import Outcome
from shared.environments.admitting import admitted
from shared.environments.places import places_of_files
from shared.environments.registry import Environments
from shared.renderers import Renderer
from shared.renderers.fitting import Fitting, gated
from shared.settings import ServiceSettings, read

BATCH = 64  # problems between two looks of the bar
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
    """In the order of the problems, each by its kind's own gate. With a bar, where it is a terminal: it takes a while."""
    settings = read(SandboxSettings)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"{path}: run in the sandbox", total=len(pairs))

        def progress(done: int) -> None:
            bar.update(task, completed=done)
            require_wanted()

        async def run() -> list[Outcome]:
            async with places_of_files(settings, SANDBOXES, settings.sandbox) as places:
                return await admitted(Environments(places), pairs, progress, BATCH)

        def work() -> list[Outcome]:
            return asyncio.run(run())

        with ThreadPoolExecutor(1) as other:  # the caller may run an event loop of its own
            return other.submit(contextvars.copy_context().run, work).result()
