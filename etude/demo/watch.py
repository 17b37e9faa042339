"""What a person sees while the demo runs: a bar and a line of figures that move; plain lines when it is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from etude.demo.progress import DEMO, Progress, Step
from shared.visible import visible

PLAIN_EVERY_S = 15.0
LAST_STEPS = 5  # one step alone says little: 128 attempts
GAIN_STEPS = 20  # of the gain, which is smaller


class View(Protocol):
    """What a phase shows of itself."""

    def done(self, now: float) -> float: ...  # in the unit of the bar's total
    def line(self, now: float) -> str: ...


@dataclass(frozen=True, slots=True)
class Practice:
    """The bar is time since the first request without pauses, in seconds; the figures are of practice alone."""

    progress: Progress

    def done(self, now: float) -> float:
        return self.progress.practised(now)

    def line(self, now: float) -> str:
        """Step, reward and pass rate of the last steps, speed, age of the samples; or who paused the run, and the way on."""
        if self.progress.paused and self.progress.paused_by == DEMO:
            return "paused by the demo itself, which resumes it when the services are ready"
        if self.progress.paused:
            return f"paused by {self.progress.paused_by}; the demo waits until it is resumed (`etude resume`, or the run's page)"
        tally, steps = self.progress.practice, self.progress.lineage[-LAST_STEPS:]
        tokens, attempts = tally.rates(now)
        if not steps:
            return (
                f"first attempts: {len(tally.attempts)} scored, {tally.solved_share:.1%} solved, {tokens:,.0f} tokens/s"
            )
        return (
            f"step {steps[-1].step:3d}  version {self.progress.newest_serial:3d}  "
            f"reward {_mean(steps, 'reward_mean'):6.3f}  solved {_mean(steps, 'solved_share'):5.1%}  {self._gain()}"
            f"{tokens:5,.0f} tokens/s  {attempts:4.1f} attempts/s  age <= {max(s.age for s in steps)}"
        )

    def _gain(self) -> str:
        """Return how many points more are solved than the first policy would solve of the same problems; "": not known yet."""
        gains = [step.metrics["solved_gain"] for step in self.progress.lineage if "solved_gain" in step.metrics]
        return f"gain {100 * fmean(gains[-GAIN_STEPS:]):+.1f}  " if gains else ""

    def end(self) -> str:
        steps = self.progress.lineage
        if not steps:
            return f"ended without a step after {len(self.progress.practice.attempts):,} attempts"
        few = min(LAST_STEPS, len(steps))
        return (
            f"{steps[-1].step} steps, {len(self.progress.practice.attempts):,} attempts in {self.progress.minutes:.1f} "
            f"minutes; solved {_mean(steps[:few], 'solved_share'):.1%} in the first {few} steps, "
            f"{_mean(steps[-few:], 'solved_share'):.1%} in the last {few}"
            f"{f', at equal difficulty {gain} points' if (gain := self._gain().strip()) else ''}; "
            f"age <= {max(s.age for s in steps)}"
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The bar is attempts scored of `total`; the figures are of all of this version's so far, greedy ones among them."""

    progress: Progress
    serial: int
    total: int

    def done(self, now: float) -> float:
        return len(self.progress.evaluated[self.serial].attempts)

    def line(self, now: float) -> str:
        tally = self.progress.evaluated[self.serial]
        if not tally.attempts:
            return f"no attempt of {self.total:,} is scored yet"
        return (
            f"{len(tally.attempts):,} of {self.total:,} attempts  solved {tally.solved_share:.1%} of them  "
            f"{tally.rates(now)[0]:,.0f} tokens/s"
        )


def evaluation_end(report: dict[str, Any], seconds: float) -> str:
    """`report`: the evaluator's."""
    f = report["figures"]
    greedy = "" if f.get("greedy") is None else f", greedy {f['greedy']:.1%}"
    return (
        f"pass@1 {f['pass_at_1']:.1%}{greedy}, of {f['problems']:,.0f} problems × {f['samples']:.0f} attempts "
        f"in {seconds:.0f} s"
    )


def _mean(steps: Sequence[Step], figure: str) -> float:
    return sum(step.metrics.get(figure, 0.0) for step in steps) / len(steps)


def say(console: Console, title: str, line: str) -> None:
    console.print(f"{title}: {line}", highlight=False, markup=False, soft_wrap=True)


def say_error(console: Console, error: BaseException) -> None:
    """Its text and its notes, as they are: what a user wrote (`files[f.py]`) is no markup."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    console.print(visible(text), style="red", highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _started(bar: Bar) -> Iterator[None]:
    """That the terminal is gone is no reason to end otherwise than was asked for."""
    bar.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            bar.stop()


def _moves(console: Console) -> bool:
    """Whether a bar can move there."""
    return console.is_terminal and not console.is_dumb_terminal


@contextlib.asynccontextmanager
async def watching(console: Console, title: str, total: float, view: View) -> AsyncIterator[None]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[line]}"),
        TimeRemainingColumn(),
    )
    bar = Bar(*columns, console=console, disable=not _moves(console))
    with _started(bar):
        task = bar.add_task(title, total=total, line="")

        async def paint() -> None:
            last = 0.0
            while True:
                now = time.time()
                line = view.line(now)
                bar.update(task, completed=min(view.done(now), total), line=line)
                if not _moves(console) and now - last >= PLAIN_EVERY_S:
                    last = now
                    say(console, title, line)
                await asyncio.sleep(0.5)

        painter = asyncio.create_task(paint())
        try:
            yield
        finally:
            painter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await painter
