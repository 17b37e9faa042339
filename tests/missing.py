"""What tests skip for on this machine. At the end of a run each is named once, with the command that brings it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import pytest

_REASON = re.compile(r"(?:Skipped: )?(?P<things>[^:`]+): not here; `(?P<command>[^`]+)`")


def reason(things: Sequence[str], command: str) -> str:
    """Return why a test needs `things`, which `command` brings, as `summary` reads it."""
    return f"{', '.join(things)}: not here; `{command}` brings {'it' if len(things) == 1 else 'them'}"


def skip(things: Sequence[str], command: str) -> NoReturn:
    pytest.skip(reason(things, command))


def summary(reasons: Iterable[str]) -> list[str]:
    """Return a line for each command, most tests first. `reasons`: of every test that was skipped, whatever for."""
    things: dict[str, set[str]] = defaultdict(set)
    tests: dict[str, int] = defaultdict(int)
    for text in reasons:
        if found := _REASON.match(text):
            things[found["command"]].update(found["things"].split(", "))
            tests[found["command"]] += 1
    return [
        f"Not here: {', '.join(sorted(things[command]))}. {count} {'test was' if count == 1 else 'tests were'} skipped; "
        f"`{command}`, then the tests again."
        for command, count in sorted(tests.items(), key=lambda item: (-item[1], item[0]))
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """pytest's hook. Of workers (-n), too: their reports come to the one process that writes."""
    reports = terminalreporter.stats.get("skipped", ())
    for line in summary(str(report.longrepr[2]) for report in reports if isinstance(report.longrepr, tuple)):
        terminalreporter.write_line(line, yellow=True)
