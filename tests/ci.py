"""What every change must pass, step by step: `python -m tests.ci`, as `make ci` does.

First what fetches and starts, then the checks beside the tests, two at a time each; then all tests (`tests.run`). Each step says
when it begins and ends, and how much is left. Its output comes as a whole when it has ended, and lies in .cache/ci. The last lines
are a table of all steps and, where a step failed, its last lines and the way out. What was started is ended, also after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FOLDER = Path(".cache/ci")
PARTS = Path(".cache/tests/parts.json")  # by tests.run
LAST = FOLDER / "last.json"  # read by `python -m benchmarks.ci`
SHOWN = 30  # of a failed step's lines
DISK_GIB = 3.0
SIDE_BY_SIDE = 2
PAUSE_S = 10.0  # before a step is tried again
GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Step:
    name: str  # of the target in the Makefile
    about_min: float  # on two idle cores; for "left" alone
    way_out: str
    tries: int = 1  # more than one where it fetches packages


REGISTRY = "a package registry did not answer, or lacks a package: the lines above name it. Try again, or name another registry"
PREPARE = (
    Step("sglang", 1.5, f"{REGISTRY}. It needs 6 GB of disk", tries=3),
    Step("programs", 0.5, f"{REGISTRY}; or a server did not start: the line above says where its log lies", tries=3),
    Step("fuzz-ready", 0.5, REGISTRY, tries=3),
    Step("trl-ready", 0.3, REGISTRY, tries=3),
)
CHECKS = (
    Step("fuzz", 2.0, "`make fuzz` shows it again"),
    Step("collect", 0.8, "the lines above name the test file that does not load"),
    Step("lint", 1.8, "`make lint` shows it again; `make format` mends what is only layout"),
    Step("trl", 0.5, "`make trl` shows it again"),
)
TESTS = Step(
    "test", 25.0, "the lines above name each failed test with its first error; run it alone: .venv/bin/pytest -n0 ID"
)


@dataclass(slots=True)
class Ended:
    step: Step
    code: int | None  # None: it was not begun
    minutes: float = 0.0
    log: Path | None = None

    @property
    def word(self) -> str:
        return "not begun" if self.code is None else "ok" if self.code == 0 else f"FAILED (exit code {self.code})"

    def text(self) -> str:
        """What it wrote; empty, or whole lines."""
        text = self.log.read_text(errors="replace").rstrip() if self.log and self.log.exists() else ""
        return f"{text}\n" if text else ""


class Run:
    """The steps of one run. `stop` ends those that are under way, from a handler of signals too."""

    def __init__(self, make: Sequence[str] = ("make", "--no-print-directory", "READY=1")) -> None:
        self._make = make
        self._living: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()
        self._speaking = threading.Lock()

    def stop(self) -> None:
        """The first time as by Ctrl-C, so that they end what they started; for good the second time, or after GRACE_S."""
        number = signal.SIGKILL if self._stopped.is_set() else signal.SIGINT
        self._stopped.set()
        for process in list(self._living):
            _end(process, number)
        if number == signal.SIGINT:
            later = threading.Timer(GRACE_S, self.stop)
            later.daemon = True
            later.start()

    def step(self, step: Step, *, whole: bool = True) -> Ended:
        """Run it, again where it may be tried again. `whole`: its output is shown when it has ended, not while it runs."""
        log = FOLDER / f"{step.name}.log" if whole else None
        began = time.monotonic()
        code: int | None = None
        for left in reversed(range(step.tries)):
            if self._stopped.is_set():
                break
            code = self._once(step, log)
            if code == 0 or self._stopped.is_set() or not left:
                break
            self.say(f"ci: {step.name} failed (exit code {code}) and is tried again, {left} of {step.tries} tries left")
            self._stopped.wait(PAUSE_S)
        return Ended(step, code, (time.monotonic() - began) / 60, log)

    def _once(self, step: Step, log: Path | None) -> int:
        with log.open("wb") if log else contextlib.nullcontext() as out:
            process = subprocess.Popen(
                [*self._make, step.name], stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0
            )
            self._living.add(process)
            try:
                return process.wait()
            finally:
                self._living.discard(process)

    def end(self) -> None:
        """End what the steps started and did not end: the servers."""
        subprocess.run([*self._make, "servers-down"], stdin=subprocess.DEVNULL)

    def say(self, text: str) -> None:
        with self._speaking:
            print(text, flush=True)


def main(run: Run | None = None, phases: Sequence[Sequence[Step]] = (PREPARE, CHECKS), tests: Step = TESTS) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    PARTS.unlink(missing_ok=True)
    run = run or Run()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: run.stop())
    if lacks := _lacks_disk():
        print(lacks, flush=True)
        return 1
    began, busy = time.monotonic(), _processor_s()
    ended: list[Ended] = []
    try:
        for phase, steps in enumerate(phases):
            later = [*(step for steps in phases[phase + 1 :] for step in steps), tests]
            ended += _two_at_a_time(run, steps, later) if _well(ended) else [Ended(step, None) for step in steps]
        run.say(f"ci: {tests.name} begins, the last step; about {tests.about_min:.0f} min")
        ended.append(run.step(tests, whole=False) if _well(ended) else Ended(tests, None))
    finally:
        run.end()
    minutes = (time.monotonic() - began) / 60
    measured = {
        "minutes": round(minutes, 2),
        "cpu_share": round((_processor_s() - busy) / (60 * minutes * (os.cpu_count() or 1)), 3),
        "steps": [{"name": each.step.name, "code": each.code, "minutes": round(each.minutes, 2)} for each in ended],
        **_tests(),
    }
    LAST.write_text(json.dumps(measured, indent=2))
    print("\n".join(_last_lines(ended, measured)), flush=True)
    return next((each.code if each.code and each.code > 0 else 1 for each in ended if each.code != 0), 0)


def _well(ended: Sequence[Ended]) -> bool:
    return all(each.code == 0 for each in ended)


def _two_at_a_time(run: Run, steps: Sequence[Step], later: Sequence[Step]) -> list[Ended]:
    """Run them; the others go on where one fails, so that all is said at once. `later`: what comes after them."""
    done: set[str] = set()

    def one(step: Step) -> Ended:
        run.say(f"ci: {step.name} begins")
        ended = run.step(step)
        done.add(step.name)
        left = [each for each in steps if each.name not in done]
        minutes = sum(each.about_min for each in left) / SIDE_BY_SIDE + sum(each.about_min for each in later)
        run.say(
            f"{ended.text()}ci: {step.name}: {ended.word} after {ended.minutes:.1f} min; "
            f"{len(left) + len(later)} steps left, about {minutes:.0f} min"
        )
        return ended

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return list(pool.map(one, steps))


def _last_lines(ended: Sequence[Ended], measured: dict[str, Any]) -> list[str]:
    lines = ["", f"{'step':<12}{'minutes':>8}  result"]
    for each in ended:
        lines.append(f"{each.step.name:<12}{each.minutes:>8.1f}  {each.word}")
    for row in measured["parts"]:
        lines.append(f"  {row['name']:<10}{row['minutes']:>8.1f}  {row['tests']} tests, {len(row['failed'])} failed")
    lines.append(f"{'all':<12}{measured['minutes']:>8.1f}  {100 * measured['cpu_share']:.0f} % of the processor used")
    for each in ended:
        if each.code:
            if each.log:
                lines += ["", *each.text().splitlines()[-SHOWN:]]
            lines += ["", f"ci: step {each.step.name} failed with exit code {each.code}. Way out: {each.step.way_out}."]
            if (free := _free_gib()) < DISK_GIB:
                lines.append(f"ci: the disk is almost full: {free:.1f} GiB free below {Path.cwd()}")
    lines += ["", *measured["said"]]
    verdict = "passed" if _well(ended) else "FAILED"
    return [
        *lines,
        f"ci: {verdict} after {measured['minutes']:.1f} min",
        f"ci: measured {json.dumps(_brief(measured))}",
    ]


def _brief(measured: dict[str, Any]) -> dict[str, Any]:
    return {name: measured[name] for name in ("minutes", "cpu_share", "second_chances")}


def _tests() -> dict[str, Any]:
    """What `tests.run` kept of its parts."""
    try:
        found = json.loads(PARTS.read_text())
    except (OSError, ValueError):
        found = {"parts": [], "said": []}
    return {**found, "second_chances": [line for line in found["said"] if line.startswith("SECOND CHANCE")]}


def _processor_s() -> float:
    """All that this machine's processors have spent, the servers' part included."""
    times = psutil.cpu_times()
    return times.user + times.system + times.nice + getattr(times, "softirq", 0.0) + getattr(times, "irq", 0.0)


def _free_gib() -> float:
    return shutil.disk_usage(".").free / 2**30


def _lacks_disk() -> str:
    free = _free_gib()
    if free >= DISK_GIB:
        return ""
    return f"ci: disk: found {free:.1f} GiB free below {Path.cwd()}; needed: {DISK_GIB:g}. Free some, or clone where there is room."


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
