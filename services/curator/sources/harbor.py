"""Harbor tasks: folders with `task.toml`, `instruction.md`, `environment/`, `tests/` and `solution/`; schema 1.x.

A task's image is not built here. Its Dockerfile may do what needs none: start from a plain Python or Linux image, and copy files
into the working directory. Where `etude tasks images` has built the image, the Dockerfile may do anything, and is read for the
files that it copies into the working directory. The tests must be pytest's, as `tests/test.sh` calls it, or a script that
needs only a shell. Both are read strictly: a line that is not understood refuses the task.

A task of several steps becomes one problem per step: the tree of a step is what the solutions of the steps before it leave. The
source `harbor-steps` makes one problem of kind `steps` of it instead (`harbor_steps`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.curator.sources import Found, Refused, docker, verifier
from services.curator.sources.clones import Clones
from services.curator.sources.rows import finished, parametrised, tests_in
from services.curator.sources.running import ran
from shared.contracts.trajectory import Change
from shared.environments.repository import patches
from shared.environments.repository.problem import RepositoryLimits
from shared.environments.repository.trees import File, Link, Tree, from_folder
from shared.objects import Objects
from shared.problems import ProblemError, others
from shared.sandbox.contract import WORKSPACE

TESTS = "harbor_tests"  # in the tree, at grading; Harbor has them in /tests
LOGS = "/tmp/harbor-logs"  # of a verifier; Harbor has them in /logs
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MG])i?B?\Z", re.IGNORECASE)
_NO_IMAGE = "no image can be had here"
_WAY_OUT = "build it (etude tasks images --out FILE) and give --images FILE"
# Of what is refused, and of fields of other types than Harbor's.
UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, OSError)


@dataclass(frozen=True, slots=True)
class Step:
    """`name`: empty for a task of one step. `folder`: where its instruction, tests and solution lie."""

    name: str
    folder: Path
    facts: Mapping[str, Any]


def read(path: Path, clones: Clones, objects: Objects) -> Iterator[Found]:
    """`path`: a task, or a folder of tasks. Raises ProblemError where there is none."""
    for task in tasks_in(path):
        yield from of_task(task, objects, bool(clones.image(task.resolve().name)))


def tasks_in(path: Path) -> list[Path]:
    """Return the folders of the tasks at a path. Raises ProblemError where there is none."""
    tasks = [path] if (path / "task.toml").is_file() else sorted(found.parent for found in path.glob("*/task.toml"))
    if not tasks and path.is_file() and (said := others.rows(path, path.read_text("utf-8-sig", "replace"))):
        raise ProblemError(said)
    if not tasks:
        raise ProblemError(
            f"{path}: found no task.toml in it or in its folders; allowed: a Harbor task, or a folder of tasks"
        )
    return tasks


def of_task(folder: Path, objects: Objects, has_image: bool) -> Iterator[Found]:
    """Yield one problem for each step of a task. `has_image`: its image is given."""
    name = folder.resolve().name
    try:
        facts = facts_of(folder, has_image)
        tree, place = start(folder, facts, has_image)
        steps = steps_of(folder, facts)
    except UNREADABLE as error:
        yield Found(name, note=said(error))
        return
    lost: str | None = None  # why the tree of this step is not known
    for step in steps:
        row = f"{name}/{step.name}" if step.name else name
        if lost:
            yield Found(row, note=f"needs what step {lost!r} leaves, which has no solution that runs here")
            continue
        try:
            found, tree = problem_of(row, step, facts, tree, place, folder, objects)
        except UNREADABLE as error:
            found, lost = Found(row, note=said(error)), step.name
        if found.hidden is not None and not found.hidden.solution:
            lost = step.name
        yield found


def facts_of(folder: Path, has_image: bool) -> dict[str, Any]:
    """Return what task.toml says. Raises Refused for what no sandbox here can give."""
    try:
        facts = tomllib.loads((folder / "task.toml").read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"task.toml: cannot be read: {error}") from None
    version = facts.get("schema_version", facts.get("version", "1.0"))
    if not str(version).startswith("1."):
        raise Refused(f"task.toml: schema_version: found {version!r:.40}; allowed: 1.x")
    place = facts.get("environment", {})
    if (image := place.get("docker_image")) and not has_image:
        raise Refused(f"needs the image {image!r:.100} (environment.docker_image); {_NO_IMAGE}: {_WAY_OUT}")
    for field in ("gpus", "mcp_servers", "tpu", "healthcheck"):
        if place.get(field):
            raise Refused(f"needs environment.{field}: found {place[field]!r:.60}, which no sandbox here has")
    if (os := place.get("os", "linux")) != "linux":
        raise Refused(f"needs the system {os!r:.40} (environment.os); allowed: linux")
    if (mode := facts.get("verifier", {}).get("environment_mode", "shared")) != "shared":
        raise Refused(f"needs a verifier of its own image (verifier.environment_mode {mode!r:.40}); {_NO_IMAGE}")
    return facts


def start(folder: Path, facts: Mapping[str, Any], has_image: bool) -> tuple[dict[str, File | Link], str]:
    """Return the files that the agent begins with, and the working directory in the image."""
    context = folder / "environment"
    for compose in ("docker-compose.yaml", "docker-compose.yml"):
        if (context / compose).exists():
            raise Refused(f"needs several containers (environment/{compose}); allowed: one, and no image of its own")
    if not (context / "Dockerfile").is_file():
        raise Refused(
            f"environment/Dockerfile: is missing; {_NO_IMAGE}, and nothing says which files the agent begins with"
        )
    tree, place = docker.built(context, has_image)
    return tree, str(facts.get("environment", {}).get("workdir") or place)


def steps_of(folder: Path, facts: Mapping[str, Any]) -> list[Step]:
    """Return the steps of a task in order. Raises Refused."""
    listed = facts.get("steps")
    if not listed:
        return [Step("", folder, {})]
    steps = [Step(str(one.get("name", "")), folder / "steps" / str(one.get("name", "")), one) for one in listed]
    for step in steps:
        if not re.fullmatch(r"[\w.-]+", step.name) or step.name in (".", "..") or not step.folder.is_dir():
            raise Refused(f"task.toml: steps: found {step.name!r:.60}; allowed: names of folders of steps/")
    return steps


def problem_of(
    row: str, step: Step, facts: Mapping[str, Any], tree: Tree, place: str, task: Path, objects: Objects
) -> tuple[Found, dict[str, File | Link]]:
    """Return the problem of one step, and the tree that its solution leaves."""
    moved = Moved(place)
    try:
        instruction = moved.text((step.folder / "instruction.md").read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"instruction.md: cannot be read: {error}") from None
    tree = prepared(step, moved, tree)
    if used := next(
        (name for name in facts.get("environment", {}).get("env", {}) if _mentions(name, step, task)), None
    ):
        raise Refused(f"needs the variable {used!r:.60} (environment.env), which the agent does not have here")
    tests, names = _tests(step, task, moved, _variables(facts, step))
    after = _solution(step, task, moved, tree)
    changes = patches.changes(tree, after) if after is not None else {}
    note = _note(facts, bool(changes))
    public = {
        "prompt": instruction,
        "category": str(facts.get("metadata", {}).get("category") or "debugging"),
        "cell": task.resolve().name,
        "origin": f"harbor:{row}",
        "limits": limits_of(facts, step.facts),
    }
    hidden = {"fail_to_pass": names, "tests": tests, "protected": [f"{TESTS}/*"], "solution": changes}
    return finished(objects, tree, row.replace("/", "."), note, public=public, hidden=hidden), dict(after or tree)


def _note(facts: Mapping[str, Any], proven: bool) -> str:
    notes = [] if proven else ["has no solution: whether it can be solved was not seen"]
    place = facts.get("environment", {})
    if place.get("allow_internet") is True or place.get("network_mode") in ("public", "allowlist"):
        notes.append("allows the network, which no attempt has here")
    return "; ".join(notes)


def said(error: Exception) -> str:
    """Return why a task cannot be read."""
    known = isinstance(error, ValueError)  # Refused, TreeError, PatchError: the text says all
    return str(error) if known else f"cannot be read: {type(error).__name__}: {error}"


def prepared(step: Step, moved: Moved, tree: Tree) -> dict[str, File | Link]:
    """Return the tree with what a step adds before it begins: files, and what its `setup.sh` makes."""
    folder = step.folder / "workdir"
    if not step.name or not folder.is_dir():
        return dict(tree)
    added = from_folder(folder)
    setup = added.pop("setup.sh", None)
    before = {**tree, **added}
    return ran(before, {"setup.sh": moved.file(setup)}, "setup.sh") if isinstance(setup, File) else before


def _mentions(name: str, step: Step, task: Path) -> bool:
    """Return whether the step's instruction, tests or solution name a variable."""
    places = (step.folder / "instruction.md", step.folder / "tests", step.folder / "solution", task / "tests")
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*")) if file.is_file()]
    return any(re.search(rf"\b{re.escape(name)}\b", file.read_text(errors="replace")) for file in files)


def _variables(facts: Mapping[str, Any], step: Step) -> dict[str, str]:
    """Return what the verifier is given in its environment."""
    given = {**facts.get("verifier", {}).get("env", {}), **step.facts.get("verifier", {}).get("env", {})}
    if secret := next((name for name, value in given.items() if "${" in str(value)), None):
        raise Refused(f"verifier.env: {secret!r:.60} comes from the machine that grades; allowed: values")
    return {str(name): str(value) for name, value in given.items()}


def _tests(step: Step, task: Path, moved: Moved, variables: Mapping[str, str]) -> tuple[dict[str, Change], list[str]]:
    """Return the tests' files in the tree, and the names of the tests."""
    files: dict[str, File | Link] = {}
    for folder in dict.fromkeys((task / "tests", step.folder / "tests")):  # a step's own win over the task's
        if folder.is_dir():
            files |= from_folder(folder)
    script = files.pop("test.sh", None)
    if not isinstance(script, File):
        raise Refused("tests/test.sh: is missing; allowed: one that calls pytest, or needs only a shell")
    text = script.data.decode(errors="replace")
    if verifier.only_shell(text):
        wrapper = verifier.WRAPPER.format(logs=LOGS, environment=dict(variables))
        files |= {"test.sh": script, "test_verifier.py": File(wrapper.encode())}
        names = [f"{TESTS}/test_verifier.py::test_reward"]
    elif variables:
        raise Refused(f"verifier.env: found {next(iter(variables))!r:.60}; allowed: none for tests of pytest")
    else:
        names = _names(verifier.test_files(text, files), files)
    tests = {}
    for path, entry in files.items():
        if isinstance(entry, Link):
            raise Refused(f"tests/{path}: is a link; allowed: files")
        tests[f"{TESTS}/{path}"] = patches.change_of(moved.file(entry))
    return tests, names


def _names(called: Sequence[str], files: Tree) -> list[str]:
    """Return the names of the tests that pytest finds in these files."""
    names = []
    for path in called:
        if many := parametrised(files, path):
            raise Refused(
                f"tests/{path}: {many[0]} is parametrised, so that only pytest knows its names; allowed: plain tests"
            )
        names += [f"{TESTS}/{path}::{name}" for name in tests_in(files, path)]
    if not names:
        raise Refused(
            f"tests: found no test in {', '.join(called)}; allowed: functions and classes as pytest finds them"
        )
    return names


def _solution(step: Step, task: Path, moved: Moved, tree: Tree) -> Tree | None:
    """Return the tree that the solution leaves; None: there is none."""
    folder = step.folder / "solution"
    if not (folder / "solve.sh").is_file():
        return None
    script = {path: moved.file(entry) for path, entry in from_folder(folder).items() if isinstance(entry, File)}
    return ran(tree, script, "solve.sh")


def limits_of(facts: Mapping[str, Any], step: Mapping[str, Any]) -> RepositoryLimits:
    """Return the limits of one step."""
    own = RepositoryLimits()
    place = facts.get("environment", {})
    seconds = step.get("agent", {}).get("timeout_sec") or facts.get("agent", {}).get("timeout_sec") or 0.0
    grading = step.get("verifier", {}).get("timeout_sec") or facts.get("verifier", {}).get("timeout_sec")
    memory = place.get("memory_mb") or _megabytes(place.get("memory")) or own.memory_mb
    return RepositoryLimits(seconds=float(seconds), grading_s=float(grading or own.grading_s), memory_mb=int(memory))


def _megabytes(text: Any) -> int:
    match = _SIZE.match(str(text or ""))
    return int(float(match[1]) * (1024 if match[2].upper() == "G" else 1)) if match else 0


class Moved:
    """Rewrites paths of the image in a task's texts, e.g. /tests -> /workspace/harbor_tests."""

    def __init__(self, place: str) -> None:
        self._folders = {place.rstrip("/"): WORKSPACE, "/tests": f"{WORKSPACE}/{TESTS}", "/logs": LOGS}

    def text(self, text: str) -> str:
        for before, after in self._folders.items():
            if before:  # an image that works in / names its files like any other of the system's
                text = re.sub(rf"(?<![\w./-]){re.escape(before)}(?![\w.-])", after, text)
        return text

    def file(self, file: File) -> File:
        try:
            return File(self.text(file.data.decode()).encode(), file.executable)
        except UnicodeDecodeError:
            return file
