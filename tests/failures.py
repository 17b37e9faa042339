"""What failed, and how long each test took, written to the file that `pytest --outcomes FILE` names, for `tests.run`."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Why a test gets no second chance.
COLLECTION, CRASH, AUDIT = "not collected", "its worker died", "an audit failed"


class AuditFailed(AssertionError):
    """Something was lost or trained twice, or was too old: a second run proves nothing about the first."""


class Outcomes:
    """Collects the first failure of each test, and its seconds: a plugin of the process that writes the report, not of workers."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed: dict[str, dict[str, Any]] = {}
        self._seconds: Counter[str] = (
            Counter()
        )  # set-up and tear-down included: a module's first test pays for its fixtures

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            error = first_line(report.longrepr)
            refused = CRASH if report.when == "???" else AUDIT if AuditFailed.__name__ in error else ""
            self._fail(report.nodeid, error, refused, report.duration)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._fail(report.nodeid, first_line(report.longrepr), COLLECTION, 0.0)

    def pytest_sessionfinish(self) -> None:
        seconds = {name: round(spent, 3) for name, spent in self._seconds.most_common()}
        self._file.write_text(json.dumps({"failed": self._failed, "seconds": seconds}))

    def _fail(self, name: str, error: str, refused: str, seconds: float) -> None:
        load = os.getloadavg()[0]
        self._failed.setdefault(name, {"error": error, "refused": refused, "seconds": seconds, "load": load})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", help="file for what failed, and why, and how long each test took (tests/run.py)")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--outcomes")
    if file and "PYTEST_XDIST_WORKER" not in os.environ:  # workers tell the process that started them
        config.pluginmanager.register(Outcomes(Path(file)))


def first_line(longrepr: Any) -> str:
    """Return the first line of an error, or the last of a text that has none."""
    crash = getattr(longrepr, "reprcrash", None)
    lines = (str(crash.message) if crash else str(longrepr)).strip().splitlines() or [""]
    return (lines[0] if crash else lines[-1])[:300]
