"""Runs all tests: `python -m tests.run [pytest's arguments]`, as `make test` does.

Part `most` runs three at a time; part `alone` (the mark of that name) one after another. Then a few tests that failed get a
second chance: they run once more, alone. It hides nothing: whoever needed it stands among the last lines and in
.cache/tests/second_chances.jsonl. A test that was not collected, whose worker died, or whose audit failed gets none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(".cache/tests")
MOST = 5  # tests that get a second chance; where more fail, something is wrong
# Three on two cores: many wait. A file stays with one worker.
PARTS = {
    "most": ["-n", "3", "--dist", "loadfile", "-m", "not nightly and not alone"],
    "alone": ["-m", "alone and not nightly"],
}
_FAILED, _NOTHING = 1, 5  # exit codes of pytest


def pytest(name: str, arguments: Sequence[str]) -> tuple[int, dict[str, Any], float]:
    """Run one part. Return its exit code, what failed by node id, and the seconds it took."""
    file = FOLDER / f"{name}.json"
    file.unlink(missing_ok=True)
    began = time.monotonic()
    code = subprocess.call([sys.executable, "-m", "pytest", "--failures", str(file), *arguments])
    failed = json.loads(file.read_text()) if file.exists() else {}
    return code, failed, time.monotonic() - began


def objection(failed: dict[str, Any]) -> str:
    """Return why there is no second chance; empty: there is one."""
    if not failed:
        return "pytest failed without a failing test"
    if len(failed) > MOST:
        return f"{len(failed)} tests failed; at most {MOST} get one"
    refused = [f"{name}: {found['refused']}" for name, found in failed.items() if found["refused"]]
    return "; ".join(refused)


def second_chance(failed: dict[str, Any]) -> int:
    """Run the tests once more, alone. Return pytest's exit code."""
    print(f"\nsecond chance: {len(failed)} of the tests failed, and run once more, alone", flush=True)
    code, again, _ = pytest("second", ["-n", "0", *failed])
    passed = [name for name in failed if name not in again] if code in (0, _FAILED) else []
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    with (FOLDER / "second_chances.jsonl").open("a") as file:
        for name in passed:
            found = failed[name]
            print(
                f"SECOND CHANCE: {name}: {found['error']}; load {found['load']:.1f}; {found['seconds']:.0f} s",
                flush=True,
            )
            file.write(json.dumps({"commit": commit, "test": name, **found}) + "\n")
    return code


def main(arguments: Sequence[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed: dict[str, Any] = {}
    codes, lines = [], []
    for name, how in PARTS.items():
        print(f"tests: part {name}", flush=True)
        code, found, seconds = pytest(name, [*how, "tests", *arguments])
        failed |= found
        codes.append(code)
        lines.append(f"tests: part {name}: exit code {code} after {seconds / 60:.1f} min, {len(found)} failed")
        if code not in (0, _FAILED, _NOTHING):  # stopped, called wrongly, or not collected
            break
    print("\n" + "\n".join(lines), flush=True)
    for name, found in failed.items():
        print(f"FAILED FIRST: {name}: {found['error']}", flush=True)
    if codes[-1] not in (0, _FAILED, _NOTHING):
        print(f"no second chance: {objection(failed)}", flush=True)
        return codes[-1]
    if _FAILED in codes:
        if why := objection(failed):
            print(f"no second chance: {why}", flush=True)
            return _FAILED
        return second_chance(failed)
    return 0 if 0 in codes else _NOTHING


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
