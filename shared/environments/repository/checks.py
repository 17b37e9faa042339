"""Checks of a repository problem that its types cannot express, made at import and again before an attempt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

from shared.contracts.trajectory import Change
from shared.environments.repository import graders, submission
from shared.environments.repository.problem import RepositoryHidden, RepositoryLimits, RepositoryProblem
from shared.environments.repository.trees import File, Tree, wrong_path

MAX_PROMPT = 200_000  # characters; an issue's text has some thousand
MAX_NAMES = 20_000  # tests
_BOUNDS: dict[str, tuple[float, float]] = {  # field -> least and most
    "turns": (0, 10_000),
    "tokens": (0, 10_000_000),
    "turn_tokens": (0, 1_000_000),
    "seconds": (0, 24 * 3600),
    "command_s": (1, 3600),
    "memory_mb": (64, 1 << 20),
    "disk_mb": (16, 1 << 20),
    "processes": (8, 4096),
    "grading_s": (1, 3600),
}

Wrong = tuple[str, str]
"""A field, and why it cannot be: found and allowed."""


def wrong_problem(problem: RepositoryProblem, tree: Tree | None = None) -> Wrong | None:
    """Return the first field of the public part that cannot be, or None. `tree`: the problem's; None: it is not at hand."""
    if not problem.prompt.strip():
        return "prompt", "is empty; allowed: an instruction, such as the text of the issue"
    if len(problem.prompt) > MAX_PROMPT:
        return "prompt", f"found {len(problem.prompt)} characters; allowed: at most {MAX_PROMPT}"
    if problem.workdir != "." and (wrong := wrong_path(problem.workdir)):
        return "workdir", f"found {problem.workdir!r:.100}: {wrong}; '.' is the tree's root"
    if tree is not None and problem.workdir != "." and not any(path.startswith(f"{problem.workdir}/") for path in tree):
        return "workdir", f"found {problem.workdir!r:.100}; allowed: a folder of the tree"
    if empty := [number for number, command in enumerate(problem.setup) if not command.strip() or "\0" in command]:
        return f"setup[{empty[0]}]", f"found {problem.setup[empty[0]]!r:.60}; allowed: a shell command"
    if wrong := wrong_image(problem.image):
        return "image", wrong
    if wrong_network := _wrong_network(problem.network):
        return wrong_network
    return _wrong_limits(problem.limits)


def wrong_image(image: str) -> str | None:
    """Return why no sandbox begins with this, or None. Whether a service has the image is not looked at."""
    if image and (not image.startswith(("base:", "docker:", "pool:")) or "\0" in image):
        return f"found {image!r:.80}; allowed: base:NAME, base:DIGEST, docker:REFERENCE, pool:NAME, or nothing"
    return None


def _wrong_network(wanted: object) -> Wrong | None:
    """Return which part of it names no hosts to reach, or None. Whether a service has the credentials is not looked at."""
    if wanted == "none":
        return None
    from shared.sandbox import SandboxUnavailable, egress

    if isinstance(wanted, dict):
        wanted = {name: value for name, value in wanted.items() if name != "credentials"}
    try:
        egress.parse(wanted, {})
    except ValueError as error:
        field, _, why = str(error).removeprefix("field '").partition("': ")
        return field, why
    except SandboxUnavailable:  # its packages are missing here: the service that opens the sandbox looks again
        return None
    return None


def _wrong_limits(limits: RepositoryLimits) -> Wrong | None:
    for name, (least, most) in _BOUNDS.items():
        value = getattr(limits, name)
        if not isfinite(value) or not least <= value <= most:
            return f"limits.{name}", f"found {_plain(value)}; allowed: {_plain(least)} to {_plain(most)}"
    return None


def _plain(number: float) -> str:
    """Return 1048576 and not 1.04858e+06."""
    return str(int(number)) if isfinite(number) and number == int(number) else f"{number:g}"


def wrong_hidden(hidden: RepositoryHidden, tree: Tree | None = None) -> Wrong | None:
    """Return the first field of the hidden part that cannot be, or None. `tree`: as for `wrong_problem`."""
    if not hidden.fail_to_pass:
        return "hidden.fail_to_pass", "is empty; allowed: the tests that fail before the solution and pass after it"
    if len(hidden.fail_to_pass) + len(hidden.pass_to_pass) > MAX_NAMES:
        return "hidden.pass_to_pass", f"found more than {MAX_NAMES} tests in both lists; allowed: at most so many"
    for field, changes in (("tests", hidden.tests), ("solution", hidden.solution)):
        if wrong := wrong_changes(f"hidden.{field}", changes):
            return wrong
    if both := set(hidden.fail_to_pass) & set(hidden.pass_to_pass):
        return "hidden.pass_to_pass", f"found {min(both)!r:.100}, which stands in fail_to_pass as well"
    for field, names in (("fail_to_pass", hidden.fail_to_pass), ("pass_to_pass", hidden.pass_to_pass)):
        if wrong := next(_wrong_names(f"hidden.{field}", names, hidden, tree), None):
            return wrong
    for number, pattern in enumerate(hidden.protected):
        if not pattern or pattern.startswith("/") or ".." in pattern.split("/") or "\0" in pattern:
            return f"hidden.protected[{number}]", f"found {pattern!r:.100}; allowed: a pattern of relative paths"
    return None


def wrong_changes(field: str, changes: Mapping[str, Change]) -> Wrong | None:
    """Return why changes cannot be put into a tree, or None. `field`: what holds them."""
    for path in changes:
        if wrong := wrong_path(path):
            return f"{field}[{path:.100}]", wrong
    wrong = submission.objection(changes)
    return (field, wrong) if wrong else None


def _wrong_names(field: str, names: Iterable[str], hidden: RepositoryHidden, tree: Tree | None) -> Iterator[Wrong]:
    runner, tests = graders.runner(hidden.runner), hidden.tests
    seen: set[str] = set()
    for number, name in enumerate(names):
        place = f"{field}[{number}]"
        if allowed := runner.wrong_name(name):
            yield place, f"found {name!r:.100}; allowed: {allowed}"
            continue
        path = runner.file_of(name, hidden)
        if path in tests and tests[path].deleted:
            yield place, f"found {name!r:.100}; `tests` deletes its file"
        elif tree is not None and path is not None and path not in tests and not isinstance(tree.get(path), File):
            yield (
                place,
                f"found {name!r:.100}; allowed: a test in a file of `tests` or of the tree, which have no {path!r:.100}",
            )
        elif name in seen:
            yield place, f"found {name!r:.100} twice; allowed: once"
        seen.add(name)
