"""Problems of one's own are run before anything counts on them: by the same check as the admission of a run, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from etude.demo.background import require_wanted
from shared.formats import Format
from shared.formats.fitting import Fitting, gated
from shared.sandbox import connect, gate
from shared.settings import ServiceSettings, read

BATCH = 64  # problems between two looks of the bar
SANDBOXES = 2  # as many as an admission runs, whatever cores a container sees: what passes here passes there


class SandboxSettings(ServiceSettings):
    sandbox: Literal["bubblewrap", "process"] = Field(
        "bubblewrap", description="Where problems are checked; a bare process only for code that you trust."
    )


def checked(path: Path, fitting: Fitting, chat: Format) -> Fitting:
    """Those of the file that its solution solves and its broken state does not, as far as there is a solution. Raises
    SandboxUnavailable, ProblemError where none is left."""
    return gated(path, fitting, _outcomes(path, fitting.pairs), chat)


def _outcomes(path: Path, pairs: Sequence[gate.Pair]) -> list[gate.Outcome]:
    """With a bar, where it is a terminal: thousands take a while."""
    functions = connect(read(SandboxSettings).sandbox, SANDBOXES)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    outcomes: list[gate.Outcome] = []
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
            task = bar.add_task(f"{path}: run in the sandbox", total=len(pairs))
            for start in range(0, len(pairs), BATCH):
                require_wanted()
                outcomes += gate.check_sync(functions, pairs[start : start + BATCH])
                bar.update(task, completed=len(outcomes))
    finally:
        functions.close_sync()
    return outcomes
