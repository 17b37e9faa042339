"""What a person sees while the demo runs: a bar and a line of figures that move; plain lines when it is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from etude.demo.progress import Progress

PLAIN_EVERY_S = 15.0


def practice_line(progress: Progress, now: float) -> str:
    """Step, reward and pass rate of the last steps, speed, age of the samples."""
    steps = progress.lineage[-5:]
    solved, tokens, attempts = progress.rates(now)
    if not steps:
        return f"first attempts: {len(progress.scored)} scored, {solved:5.1%} solved, {tokens:,.0f} tokens/s"
    mean = {k: sum(s.metrics.get(k, 0.0) for s in steps) / len(steps) for k in ("reward_mean", "solved_share")}
    return (
        f"step {steps[-1].step:3d}  version {progress.newest_serial:3d}  reward {mean['reward_mean']:6.3f}  "
        f"solved {mean['solved_share']:5.1%}  {tokens:5,.0f} tokens/s  {attempts:4.1f} attempts/s  "
        f"age <= {max(s.age for s in steps)}"
    )


@contextlib.asynccontextmanager
async def watching(console: Console, progress: Progress, title: str, total: float, kind: str) -> AsyncIterator[None]:
    """`kind` practice: the bar is time since the first request, in seconds; evaluation: the bar is attempts scored."""
    before = progress.evaluated
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[line]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, line="")

        async def paint() -> None:
            last = 0.0
            while True:
                now = time.time()
                if kind == "practice":
                    done = now - progress.first_request if progress.first_request else 0.0
                    line = practice_line(progress, now)
                else:
                    done = progress.evaluated - before
                    solved, tokens, _ = progress.rates(now)
                    line = f"{done:5.0f} of {total:.0f} attempts  solved {solved:5.1%}  {tokens:,.0f} tokens/s"
                bar.update(task, completed=min(done, total), line=line)
                if not console.is_terminal and now - last >= PLAIN_EVERY_S:
                    last = now
                    console.print(f"{title}: {line}", highlight=False, soft_wrap=True)
                await asyncio.sleep(0.5)

        painter = asyncio.create_task(paint())
        try:
            yield
        finally:
            painter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await painter
