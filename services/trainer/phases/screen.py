"""How far a phase is: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from services.trainer.phases.config import Phase, PhaseConfig
from services.trainer.phases.heldout import Loss
from services.trainer.phases.sources import Sources
from services.trainer.phases.state import Progress

EVERY_S = 10.0  # between lines where there is no terminal


class Silent:
    """Says nothing: ranks that do not lead, and tests. Implements phase.Screen."""

    def begins(self, phase: Phase, config: PhaseConfig, found: Sources, progress: Progress, budget: int) -> None: ...
    def step(self, progress: Progress, loss: float, tokens_per_s: float) -> None: ...

    def measures(self, name: str, windows: int) -> Callable[[int], None]:
        return lambda done: None

    def measured(self, name: str, loss: Loss) -> None: ...


class Bar:
    """Implements phase.Screen. Use it as a context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._plain = not console.is_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        self._bars = Bars(*columns, console=console, disable=self._plain)
        self._task: TaskID | None = None
        self._said, self._budget, self._mean = 0.0, 0, 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()

    def begins(self, phase: Phase, config: PhaseConfig, found: Sources, progress: Progress, budget: int) -> None:
        self._budget = budget
        goes_on = f"; goes on after step {progress.step}" if progress.step else ""
        self.say(
            f"{phase}: {len(found.train):,} sequences, {found.train.targets:,} targets an epoch; trains {budget:,}{goes_on}"
        )
        for reason, count in sorted(found.passed_over.items()):
            self.say(f"left out, {reason}: {count:,}")
        self._task = self._bars.add_task(phase, total=budget, completed=progress.targets, facts="")

    def step(self, progress: Progress, loss: float, tokens_per_s: float) -> None:
        self._mean = loss if not self._mean else 0.9 * self._mean + 0.1 * loss
        facts = f"step {progress.step}  loss {loss:.3f} (mean {self._mean:.3f})  {tokens_per_s:,.0f} tokens/s"
        if self._task is not None:
            self._bars.update(self._task, completed=progress.targets, facts=facts)
        now = time.monotonic()
        if self._plain and (now - self._said > EVERY_S or progress.targets >= self._budget):
            self._said = now
            self.say(f"{facts}  {progress.targets:,} of {self._budget:,} targets")

    def measures(self, name: str, windows: int) -> Callable[[int], None]:
        task = self._bars.add_task(f"measure {name}", total=windows, facts="held-out loss")
        done = 0

        def tell(more: int) -> None:
            nonlocal done
            done += more
            self._bars.update(task, completed=done, visible=done < windows)

        return tell

    def measured(self, name: str, loss: Loss) -> None:
        bits = f", {loss.bits_per_byte:.4f} bits per byte" if loss.bits_per_byte else ""
        self.say(f"held out, {name}: {loss.per_token:.4f} nats per token over {loss.tokens:,}{bits}")

    def say(self, line: str) -> None:
        if self._plain:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bars.console.print(line, highlight=False, markup=False)
