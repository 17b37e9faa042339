"""Runs all tests: `python -m tests.run [pytest's arguments]`, as `make test` does.

Part `most` runs four files at a time; part `heavy` (the mark of that name) two. Then a few tests that failed get a
second chance: they run once more, alone. It hides nothing: whoever needed it stands among the last lines and in
.cache/tests/second_chances.jsonl. A test that was not collected, whose worker died, or whose audit failed gets none.
The last lines name the parts with their minutes, the slowest tests, and each failure with its first error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(".cache/tests")
MOST = 5  # tests that get a second chance; where more fail, something is wrong
SLOWEST = 20
# Four on two cores: tests wait for half of their time. A file stays with one worker, long files first (tests/order.py).
PARTS = {
    "most": ["-n", "4", "--dist", "loadfile", "-m", "not nightly and not heavy"],
    "heavy": ["-n", "2", "--dist", "loadfile", "-m", "heavy and not nightly"],  # whole platforms: they compute
}
MARKS = ("heavy",)  # parts of a few files: each worker imports all files that it is given
_FAILED, _NOTHING = 1, 5  # exit codes of pytest
_ENDED = (0, _FAILED, _NOTHING)  # not: stopped, called wrongly, or not collected


@dataclass(slots=True)
class Part:
    name: str
    code: int
    minutes: float
    tests: int = 0
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of each test


def run(name: str, arguments: Sequence[str]) -> Part:
    """Run one part with pytest."""
    file = FOLDER / f"{name}.json"
    file.unlink(missing_ok=True)
    began = time.monotonic()
    code = subprocess.call([sys.executable, "-m", "pytest", "--outcomes", str(file), *arguments])
    minutes = (time.monotonic() - began) / 60
    if not file.exists():
        return Part(name, code, minutes)
    found = json.loads(file.read_text())
    return Part(name, code, minutes, len(found["seconds"]), found["failed"], found["seconds"])


def marked(name: str) -> list[str]:
    """Return the test files that use the mark of this name; all tests where none does."""
    files = (str(path) for path in sorted(Path("tests").rglob("test_*.py")) if f"mark.{name}" in path.read_text())
    return list(files) or ["tests"]


def objection(failed: dict[str, Any]) -> str:
    """Return why there is no second chance; empty: there is one."""
    if not failed:
        return "pytest failed without a failing test"
    if len(failed) > MOST:
        return f"{len(failed)} tests failed; at most {MOST} get one"
    refused = [f"{name}: {found['refused']}" for name, found in failed.items() if found["refused"]]
    return "; ".join(refused)


def second_chance(failed: dict[str, Any]) -> tuple[Part, list[str]]:
    """Run the tests once more, alone. Return that run, and a line for each that passed."""
    print(f"\nsecond chance: {len(failed)} of the tests failed, and run once more, alone", flush=True)
    again = run("second", ["-n", "0", *failed])
    passed = [name for name in failed if name not in again.failed] if again.code in (0, _FAILED) else []
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines = []
    with (FOLDER / "second_chances.jsonl").open("a") as file:
        for name in passed:
            found = failed[name]
            lines.append(
                f"SECOND CHANCE: {name}: {found['error']}; load {found['load']:.1f}; {again.seconds.get(name, 0):.0f} s"
            )
            file.write(json.dumps({"commit": commit, "test": name, **found}) + "\n")
    return again, lines


def table(parts: Sequence[Part]) -> list[str]:
    """Return what took how long: the parts, then the slowest tests."""
    lines = ["", f"{'part':<10}{'minutes':>8}{'tests':>8}{'failed':>8}"]
    lines += [f"{part.name:<10}{part.minutes:>8.1f}{part.tests:>8}{len(part.failed):>8}" for part in parts]
    spent = sorted(((s, name) for part in parts for name, s in part.seconds.items()), reverse=True)[:SLOWEST]
    return [*lines, "", f"the {len(spent)} slowest tests, in seconds", *(f"{s:>8.1f}  {name}" for s, name in spent)]


def main(arguments: Sequence[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    parts: list[Part] = []
    for number, (name, how) in enumerate(PARTS.items(), 1):
        print(f"tests: part {name} begins, {number} of {len(PARTS)}", flush=True)
        parts.append(run(name, [*how, *(marked(name) if name in MARKS else ["tests"]), *arguments]))
        print(f"tests: part {name}: exit code {parts[-1].code} after {parts[-1].minutes:.1f} min", flush=True)
        if parts[-1].code not in _ENDED:
            break
    failed = {name: found for part in parts for name, found in part.failed.items()}
    code, said = _verdict(parts, failed)
    _keep(parts, said)
    print("\n".join(table(parts)), flush=True)
    for name, found in failed.items():
        print(f"FAILED FIRST: {name}: {found['error']}", flush=True)
    print("\n".join(said), flush=True)
    return code


def _verdict(parts: list[Part], failed: dict[str, Any]) -> tuple[int, list[str]]:
    """Give the second chance if there is one. Return the exit code and the last lines."""
    codes = [part.code for part in parts]
    if codes[-1] not in _ENDED:
        return codes[-1], [f"no second chance: {objection(failed)}"]
    if _FAILED not in codes:
        return (0 if 0 in codes else _NOTHING), [f"tests: {sum(part.tests for part in parts)} ended, none failed"]
    if why := objection(failed):
        return _FAILED, [f"no second chance: {why}"]
    again, lines = second_chance(failed)
    parts.append(again)
    return again.code, [*lines, *(f"FAILED AGAIN: {name}: {found['error']}" for name, found in again.failed.items())]


def _keep(parts: Sequence[Part], said: Sequence[str]) -> None:
    """For `tests.ci`, which has parts of its own."""
    rows = [{**asdict(part), "seconds": None} for part in parts]
    (FOLDER / "parts.json").write_text(json.dumps({"parts": rows, "said": list(said)}))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
