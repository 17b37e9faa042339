"""The ruff that stays gives the answers of one that is started for every text, and survives its own end."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward import ruff_server
from services.reward.ruff_server import RULES, Issue, RuffServer, Unavailable
from tests.standstill import stand_still

RUFF = Path(sysconfig.get_path("scripts")) / "ruff"
pytestmark = pytest.mark.skipif(not RUFF.exists(), reason="ruff is not installed (pip install 'etude[style]')")
PRAGMAS = ("noqa", "NoQA: F401", "ruff: " + "noqa", "flake8: " + "noqa", "ruff: " + "disable[F401]", "noqa_", "ruff")
LINES = (
    "import os", "import a, b", "x = lambda: 1", "def f(l=[]):", "    return l ", "\treturn 1", "if x == None: pass", "y = 'é😀'",
    "l = 2", "for i in y: pass", "try:", "except:", "    pass", "print('%s' % (1, 2))", "f'{'", "class C:", "\ufeff",
    "assert (1, 'x')",
    "import noqa", "from ruff import NoQa as n", "__all__ = ['noqa']", "'''", "", "\x0c", "\ud800", "lines = 1 \\", "# qzxw",
    "return",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RuffServer]:
    one = RuffServer()
    yield one
    one.close()


def from_files(texts: Sequence[str]) -> list[list[Issue]]:
    """As the term did it before: all texts as files, and one run of ruff."""
    with tempfile.TemporaryDirectory() as place:
        for number, text in enumerate(texts):
            (Path(place) / f"s{number}.py").write_bytes(text.encode("utf-8", "replace"))
        argv = [str(RUFF), "check", "--isolated", "--no-cache", "--ignore-noqa", "--exit-zero", "--select", RULES]
        done = subprocess.run([*argv, "--output-format", "json", place], capture_output=True, cwd=place, check=False)
    found: list[list[Issue]] = [[] for _ in texts]
    for row in json.loads(done.stdout):
        issue = (row["location"]["row"], row["code"] or "E9", row["message"])
        found[int(Path(row["filename"]).stem[1:])].append(issue)
    return found


notes, ends = st.sampled_from(("", *PRAGMAS)), st.sampled_from(("\n", "\r\n", "\n\n"))
line = st.builds(lambda code, note: f"{code}  # {note}" if note else code, st.sampled_from(LINES), notes)
text = st.builds(lambda lines, end: end.join(lines) + end, st.lists(line, max_size=8), ends)


def test_texts_and_answers_larger_than_a_pipe_hold_nobody_up(
    server: RuffServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ruff_server, "TIME_S", 60.0)  # held up it would take all of it; a busy machine is slow
    texts = [f"# {number}\n" * 5000 + f"import os, a{number}\n" * 150 for number in range(6)]
    found = server.issues([*texts, texts[3], ""])
    others = from_files([*texts, texts[3], ""])
    assert [sorted(issues) for issues in found] == [sorted(issues) for issues in others]
    assert min(len(issues) for issues in found[:6]) > 150


@settings(max_examples=8)
@given(st.lists(text, min_size=1, max_size=12))
def test_its_answers_are_those_of_ruff_on_files(server: RuffServer, texts: list[str]) -> None:
    for own, other in zip(server.issues(texts), from_files(texts), strict=True):
        assert sorted(own) == sorted(other)


def test_its_answers_on_real_code_are_those_of_ruff_on_files(
    server: RuffServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ruff_server, "TIME_S", 60.0)
    texts = [path.read_text() for path in sorted(Path(json.__file__).parent.parent.glob("[a-c]*.py"))[:20]]
    found = server.issues(texts)
    assert [sorted(each) for each in found] == [sorted(each) for each in from_files(texts)]
    assert sum(map(len, found)) > 20


def test_a_server_that_ended_is_replaced(server: RuffServer) -> None:
    assert server.issues(["import os\n"])[0][0][1] == "F401"
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    assert server.issues(["import sys\n"])[0][0][1] == "F401"


def test_a_server_that_hangs_costs_one_time_limit_and_is_replaced(
    server: RuffServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.issues(["import ast\n"])
    assert server._process is not None
    hung = server._process
    stand_still(hung)
    monkeypatch.setattr(ruff_server, "TIME_S", 0.3)
    with pytest.raises(Unavailable, match="no answer within"):
        server.issues(["import re\n" + "x = 1\n" * 50_000])
    assert hung.poll() is not None
    monkeypatch.undo()
    assert server.issues(["import re\n"])[0][0][1] == "F401"


def test_what_the_caller_does_while_ruff_works_is_not_its_time(
    server: RuffServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.ask(["import abc\n", "x = 1\n", "import abc\n", ""])
    second = server.ask(["import bisect\n", "import abc\n"])
    later = time.monotonic() + 10 * ruff_server.TIME_S
    monkeypatch.setattr(ruff_server, "time", SimpleNamespace(monotonic=lambda: later))
    assert [[rule for _, rule, _ in issues] for issues in server.answers(second)] == [["F401"], ["F401"]]
    assert [[rule for _, rule, _ in issues] for issues in server.answers(first)] == [["F401"], [], ["F401"], []]


def test_texts_of_one_attempt_wake_ruff_once(server: RuffServer, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = server._write
    monkeypatch.setattr(server, "_write", lambda frames, deadline: (written.append(frames), write(frames, deadline)))
    texts = ["import cmd\n", "import code\n", "import cmd\n"]
    assert [issues[0][1] for issues in server.issues(texts)] == ["F401"] * 3
    server.issues(texts)
    assert len(written) == 1


def test_a_missing_ruff_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruff_server.shutil, "which", lambda *_, **__: None)
    with pytest.raises(Unavailable, match=r"not installed here \(pip install 'etude\[style\]'\)"):
        RuffServer().issues(["import os\n"])
