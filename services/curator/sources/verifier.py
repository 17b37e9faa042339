"""Harbor's `tests/test.sh`. Where it does no more than to run pytest and to write a reward, its tests are pytest's own. Read
strictly: a line that is not understood refuses the task, with its number. A script that only needs a shell is one test, which
runs it and reads the reward that it wrote."""

from __future__ import annotations

import re
import shlex

from services.curator.sources import Refused
from services.curator.sources.lines import continued
from shared.environments.repository.trees import Tree

# Commands that prepare pytest, look at where they are, or write what it returned.
_BOILERPLATE = re.compile(
    r"""(
    set\ [-+].*
    | (sudo\ )?apt(-get)?\ (-\S+\ )*(update|install)\b.*
    | curl\ .*\buv\b.*
    | (source|\.)\ \S*\.local/bin/env | (source|\.)\ \S*/bin/activate
    | export\ PATH=.*
    | uv\ (venv|init|add|pip\ install)\b.* | (python3?\ -m\ )?pip3?\ install\b.*\bpytest\b.*
    | mkdir\ -p\ /logs\S* | cd\ \S+
    | ((if|elif)\ )?(!\ )?(\[\ .*\ \]|\[\[\ .*\ \]\]) | then | else | fi
    | (status|rc|code|exit_code|result|EXIT_CODE|TEST_EXIT_CODE|RESULT)=\$\?
    | echo(\ .*)? | true
    | exit(\ \S+)?
    )\Z""",
    re.VERBOSE,
)
_AND_THEN = re.compile(r"&&|\|\||;")
_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"`$]|\$(?!\())*\"")
# Redirections that change no file of the task, and pipes that Harbor's template has.
_HARMLESS = re.compile(
    r"\s*\d?>>?\s*(/logs/(?!\S*\.\.)[\w./-]+|/dev/null|&[12])(?=\s|\Z)"
    r"|(?<=/install\.sh)\s*\|\s*(ba)?sh\Z"
    r"|\s*\|\s*tee\s+(-a\s+)?/logs/(?!\S*\.\.)[\w./-]+\Z"
)
_OPERATOR = re.compile(r"[&|<>`()]")
_OPTION = r"( --?[\w-]+(=\S+| [^-\s]\S*)?)*"
_BEFORE = re.compile(rf"((\S*/)?uvx{_OPTION}|(\S*/)?uv( tool)? run{_OPTION})?( ?(\S*/)?python3? -m)?\Z")  # of pytest
_NEEDS = re.compile(r"\b(pytest|uvx?|pip3?|apt(-get)?|curl|wget|npm|docker)\b")  # more than a shell
WRAPPER = '''"""Runs the task's own verifier, as Harbor does, and reads the reward that it wrote."""

import json
import os
import shutil
import subprocess
from pathlib import Path

LOGS = Path({logs!r})
ENVIRONMENT = {environment!r}


def test_reward():
    shutil.rmtree(LOGS, ignore_errors=True)
    (LOGS / "verifier").mkdir(parents=True)
    script = Path(__file__).with_name("test.sh")
    done = subprocess.run(["/bin/bash", str(script)], env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    text, values = LOGS / "verifier/reward.txt", LOGS / "verifier/reward.json"
    assert text.exists() or values.exists(), f"no reward: {{done.stdout[-500:]}}{{done.stderr[-500:]}}"
    rewards = list(json.loads(values.read_text()).values()) if values.exists() else [text.read_text()]
    assert rewards and all(float(reward) == 1.0 for reward in rewards), rewards
'''

_ROOT = re.compile(r'"?(/tests|\$\{?TEST_DIR\}?)"?(?:/(?P<path>.*?))?"?\Z')
_WITH_VALUE = {"--ctrf", "-o", "-p", "--junitxml", "--junit-xml", "--tb", "-c", "--with", "--python", "--rootdir"}


def only_shell(script: str) -> bool:
    """Return whether the verifier needs only a shell and the usual tools."""
    lines = (line for line in script.splitlines() if not line.lstrip().startswith("#"))
    return not any(_NEEDS.search(line) for line in lines)


def test_files(script: str, files: Tree) -> list[str]:
    """Return the files of tests that the script runs, below tests/. Raises Refused."""
    calls: list[str] = []
    for number, line in continued(script, comments=False):
        for command in _commands(line):
            if _OPERATOR.search(command) is None and _BOILERPLATE.match(command):
                continue
            if _OPERATOR.search(command) or not re.search(r"\bpytest\b", command):
                raise Refused(
                    f"tests/test.sh, line {number}: {line:.100}: is not understood; allowed: one call of pytest, and what "
                    "Harbor's own template has around it"
                )
            calls.append(command)
    if len(calls) != 1:
        raise Refused(f"tests/test.sh: found {len(calls)} calls of pytest; allowed: one")
    return _called(calls[0], files)


def _commands(line: str) -> list[str]:
    """Return the commands of a line, without harmless redirections and the operators inside of plain quotes."""
    if "\\" not in line:  # a backslash may quote a quote
        line = _QUOTED.sub(lambda found: re.sub(r"[;&|<>()]", " ", found[0]), line)
    parts = (re.sub(r"\A(then|else) +", "", part.strip()) for part in _AND_THEN.split(line))
    return [_HARMLESS.sub("", part) for part in parts if part]


def _called(line: str, files: Tree) -> list[str]:
    try:
        words = shlex.split(line)
    except ValueError:
        raise Refused(f"tests/test.sh: {line:.100}: is not understood") from None
    places = [at for at, word in enumerate(words) if re.fullmatch(r"(\S*/)?pytest", word)]
    if not places or not _BEFORE.match(" ".join(words[: places[-1]])):
        raise Refused(f"tests/test.sh: {line:.100}: is not understood; allowed: a call of pytest itself")
    words = words[places[-1] + 1 :]
    named: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word.startswith(("-k", "-m", "--deselect", "--ignore")) or "::" in word:
            raise Refused(f"tests/test.sh: {word}: chooses among the tests; allowed: whole files")
        elif word.startswith("-"):
            skip = word in _WITH_VALUE
        elif match := _ROOT.match(word):
            named += _below(match["path"] or "", files, word)
        else:
            raise Refused(f"tests/test.sh: {word:.80}: is no file of /tests; allowed: files of it")
    return list(dict.fromkeys(named)) or _below("", files, "/tests")


def _below(path: str, files: Tree, word: str) -> list[str]:
    path = path.strip("/")
    if path in files:
        return [path]
    found = [
        name
        for name in sorted(files)
        if (not path or name.startswith(f"{path}/")) and re.search(r"(^|/)(test_[^/]*|[^/]*_test)\.py\Z", name)
    ]
    if not found:
        raise Refused(f"tests/test.sh: {word:.80}: found no file of tests there")
    return found
