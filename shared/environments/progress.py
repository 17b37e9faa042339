"""Progress of problems that are run in sandboxes: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shared.visible import visible

EVERY_S = 15.0  # between two lines where there is no terminal: a file of thousands of problems does not fill a log


@contextmanager
def shown(
    what: str, total: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes how many of `total` problems are done. `what`: names the problems, such as their file.
    `console`: None: standard error. `clock`: gives seconds."""
    console = console or Console(stderr=True)
    text = f"{visible(what)}: run in the sandbox"
    if not console.is_terminal:
        yield _lines(text, total, console, clock)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(text: str, total: int, console: Console, clock: Callable[[], float]) -> Callable[[int], None]:
    begun = said = clock()
    if total:
        console.print(f"{text}: {total} problems", markup=False, highlight=False, soft_wrap=True)

    def progress(done: int) -> None:
        nonlocal said
        now = clock()
        if not done or now - said < EVERY_S:
            return
        said = now
        left = (now - begun) * (total - done) / done
        console.print(
            f"{text}: {done} of {total}, {now - begun:.0f} s, about {left:.0f} s left",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    return progress
