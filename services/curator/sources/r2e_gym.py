"""R2E-Gym: a commit, its tests as files of their own, and what each of them gave after the commit.

Fields: `repo_name`, `commit_hash`, `problem_statement`, and three texts of JSON: `parsed_commit_content` (the commit's files
before and after it), `execution_result_content` (the tests, and what they printed before and after), `expected_output_json`.
The tree is that of the commit's parent, and the tests go into `r2e_tests/`, where R2E-Gym runs them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from services.curator.sources import Found, Refused
from services.curator.sources.clones import Clones
from services.curator.sources.rows import finished, read_rows, text
from shared.contracts.trajectory import Change
from shared.environments.repository.trees import wrong_path
from shared.objects import Objects

FOLDER = "r2e_tests"
_RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+?\.py)::(.+)\Z")


def read(path: Path, clones: Clones, objects: Objects) -> Iterator[Found]:
    return read_rows(path, lambda row: _made(row, clones, objects))


def _made(row: dict[str, Any], clones: Clones, objects: Objects) -> Found:
    repository, commit = text(row, "repo_name"), text(row, "commit_hash")
    name = str(row.get("instance_id") or f"{repository.replace('/', '__')}-{commit[:12]}")
    expected = [test for test, result in _json(row, "expected_output_json").items() if result == "PASSED"]
    run, parsed = _json(row, "execution_result_content"), _json(row, "parsed_commit_content")
    tests = _files(run)
    after, before = _results(run, "new_commit_res_stdout"), _results(run, "old_commit_res_stdout")
    if not before:
        raise Refused(
            "field 'execution_result_content': found no results of the commit's parent; allowed: pytest's own, with -rA"
        )
    places = _places(after)
    missing = [test for test in expected if test not in places]
    if missing:
        raise Refused(f"field 'expected_output_json': found {missing[0]!r:.80}, which no file of tests has printed")
    ambiguous = [test for test in expected if len(places[test]) > 1]
    if ambiguous:
        raise Refused(
            f"field 'expected_output_json': found {ambiguous[0]!r:.80}, which {' and '.join(places[ambiguous[0]])} could be; "
            "allowed: names that one file of tests has"
        )
    named = [places[test][0] for test in expected]
    passed = {f"{path}::{test}" for (path, test), result in before.items() if result == "PASSED"}
    parent = str(parsed.get("old_commit_hash") or f"{commit}^")
    tree = clones.tree(repository, parent)
    return finished(
        objects,
        tree,
        name,
        clones.note(),
        public={
            "prompt": text(row, "problem_statement"),
            "cell": repository,
            "origin": f"{repository}@{commit}",
            "commit": parent,
        },
        hidden={
            "fail_to_pass": [name for name in named if name not in passed],
            "pass_to_pass": [name for name in named if name in passed],
            "tests": tests,
            "protected": [f"{FOLDER}/*"],
            "solution": _solution(parsed),
        },
    )


def _json(row: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = row.get(field)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Refused(f"field {field!r}: found {row.get(field)!r:.80}; allowed: a JSON object, or the text of one")
    return value


def _files(run: Mapping[str, Any]) -> dict[str, Change]:
    found, codes = run.get("test_file_names"), run.get("test_file_codes")
    if not isinstance(found, list) or not isinstance(codes, list) or not found or len(found) != len(codes):
        raise Refused(
            "field 'execution_result_content': found no files of tests; allowed: test_file_names, test_file_codes"
        )
    files: dict[str, Change] = {}
    for name, code in zip(found, codes, strict=True):
        path = f"{FOLDER}/{PurePosixPath(str(name)).name}"
        if wrong := wrong_path(path):
            raise Refused(f"field 'execution_result_content': the file of tests {name!r:.80}: {wrong}")
        if path in files:
            raise Refused(f"field 'execution_result_content': found two files {path!r:.80}; allowed: one of each name")
        files[path] = Change(text=str(code))
    return files


def _results(run: Mapping[str, Any], field: str) -> dict[tuple[str, str], str]:
    """Return (file, test) -> result from the summary that `pytest -rA` prints."""
    found: dict[tuple[str, str], str] = {}
    for line in str(run.get(field) or "").splitlines():
        if match := _RESULT.match(line.strip()):
            test = match[3] if match[1] == "PASSED" else match[3].partition(" - ")[0]  # with what it raised
            found[f"{FOLDER}/{PurePosixPath(match[2]).name}", test] = match[1]
    return found


def _places(results: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return a test's short name -> all tests that it could mean, as pytest writes them."""
    found: dict[str, list[str]] = {}
    for path, test in results:
        found.setdefault(_short(test), []).append(f"{path}::{test}")
    return found


def _short(test: str) -> str:
    """Return a test's name as R2E-Gym writes it: `Class.name`, with `.` for `::` in its parameters too."""
    return test.replace("::", ".")


def _solution(parsed: Mapping[str, Any]) -> dict[str, Change]:
    """Return the files as the commit leaves them, without its tests."""
    changes: dict[str, Change] = {}
    for diff in parsed.get("file_diffs") or ():
        path = str(((diff.get("header") or {}).get("file") or {}).get("path") or "")
        if diff.get("is_binary_file"):
            raise Refused(f"field 'parsed_commit_content': {path!r:.80} is no text")
        if wrong := wrong_path(path):
            raise Refused(f"field 'parsed_commit_content': {path!r:.80}: {wrong}")
        parts = PurePosixPath(path).parts
        if any(part in ("test", "tests") for part in parts) or parts[-1].startswith("test_"):
            continue
        changes[path] = Change() if _deleted(diff) else Change(text=text(diff, "new_file_content", empty=True))
    return changes


def _deleted(diff: Mapping[str, Any]) -> bool:
    """Return whether the diff deletes its file. A file without content may also be new or emptied."""
    line = str((diff.get("header") or {}).get("misc_line") or "")
    return line.startswith("deleted file") or (diff.get("plus_file") or {}).get("path") == "/dev/null"
