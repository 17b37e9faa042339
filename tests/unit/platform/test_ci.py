"""`make ci`: it says where it is, names what failed with the way out, and ends what it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ci as figures
from tests.patience import patient, until

ROOT = Path(__file__).parents[3]
# In make's place: a step is a shell script of that name; what is begun stands in the file `begun`.
MAKE = 'echo "$1" >> begun; if [ -e "$1.sh" ]; then exec sh "$1.sh"; fi; echo "$1 speaks"'
PROGRAM = f"""
import sys
from tests import ci
ci.PAUSE_S = ci.GRACE_S = 0.05
get, start = ci.Step("get", 1, "ask another registry", tries=3), ci.Step("start", 1, "look into its log")
phases = [[get, start], [ci.Step("lint", 1, "format")]]
sys.exit(ci.main(ci.Run(["sh", "-c", {MAKE!r}, "make"]), phases, ci.Step("test", 25, "mend the tests")))
"""


def begin(folder: Path, **scripts: str) -> subprocess.Popen[str]:
    for name, script in scripts.items():
        (folder / f"{name}.sh").write_text(script)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run(folder: Path, **scripts: str) -> tuple[int, str, list[str]]:
    """Return the exit code, the output, and the steps that were begun."""
    process = begin(folder, **scripts)
    text, _ = process.communicate(timeout=patient(60))
    return process.returncode, text, (folder / "begun").read_text().split()


def test_every_step_says_how_long_it_took_and_how_much_is_left(tmp_path: Path) -> None:
    code, text, begun = run(tmp_path)
    assert code == 0, text
    assert begun[-3:] == ["lint", "test", "servers-down"]
    assert sorted(begun[:2]) == ["get", "start"]
    assert "lint speaks" in text
    assert "ci: lint: ok after 0.0 min; 1 steps left, about 25 min" in text
    assert "ci: passed after 0.0 min" in text.splitlines()[-2]


def test_a_step_that_fails_is_named_with_its_last_lines_and_the_way_out(tmp_path: Path) -> None:
    code, text, begun = run(tmp_path, start="echo no port is free; exit 7")
    assert code == 7
    assert "lint" not in begun
    assert "test" not in begun
    assert begun[-1] == "servers-down"
    last = text.splitlines()[-8:]
    assert "no port is free" in last
    assert "ci: step start failed with exit code 7. Way out: look into its log." in last


def test_what_fetches_is_tried_again(tmp_path: Path) -> None:
    code, text, begun = run(tmp_path, get="[ -e there ] && exit 0; touch there; exit 1")
    assert code == 0, text
    assert begun.count("get") == 2
    code, text, begun = run(tmp_path, get="exit 1")
    assert code == 1
    assert begun.count("get") == 2 + 3
    assert "ask another registry" in text


def test_tests_that_fail_fail_the_whole(tmp_path: Path) -> None:
    parts = {
        "parts": [{"name": "most", "minutes": 20, "tests": 9, "failed": {"t": {}}}],
        "said": ["SECOND CHANCE: t: x; load 1.0; 2 s"],
    }
    script = f"mkdir -p .cache/tests; echo '{json.dumps(parts)}' > .cache/tests/parts.json; exit 1"
    code, text, _ = run(tmp_path, test=script)
    assert code == 1
    assert "SECOND CHANCE: t: x" in text
    assert "ci: FAILED after" in text.splitlines()[-2]


@pytest.mark.parametrize(
    "script", ["echo > here; exec tail -f /dev/null", "trap '' INT; echo > here; while :; do tail -f /dev/null; done"]
)
def test_ctrl_c_ends_the_step_and_the_servers(script: str, tmp_path: Path) -> None:
    process = begin(tmp_path, test=script)
    until((tmp_path / "here").exists, "the step runs")
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=patient(60))  # it ends only when all that hold its output have ended
    assert process.returncode != 0
    assert (tmp_path / "begun").read_text().split()[-1] == "servers-down"
    assert "ci: FAILED" in text


def test_its_figures_are_read_from_the_last_run_or_from_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text, _ = run(tmp_path)
    log, out = tmp_path / "log", tmp_path / "out.json"
    log.write_text(text)
    for source in (log, tmp_path / ".cache/ci/last.json"):
        figures.main(["--log", str(source), "--json", str(out)])
        found = {row["id"]: row for row in json.loads(out.read_text())}
        assert set(found) == {"ci.minutes", "ci.cpu_share", "ci.second_chances"}
        assert found["ci.second_chances"]["value"] == 0
    with pytest.raises(SystemExit):
        figures.main(["--log", str(tmp_path / "begun")])
    assert "no line 'ci: measured" in capsys.readouterr().err
