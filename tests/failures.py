"""What failed, written to the file that `pytest --failures FILE` names, for `tests.run`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# Why a test gets no second chance.
COLLECTION, CRASH, AUDIT = "not collected", "its worker died", "an audit failed"


class AuditFailed(AssertionError):
    """Something was lost or trained twice, or was too old: a second run proves nothing about the first."""


class Failures:
    """Collects the first failure of each test. A plugin of the process that writes the report, also of its workers' tests."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            error = first_line(report.longrepr)
            refused = CRASH if report.when == "???" else AUDIT if AuditFailed.__name__ in error else ""
            self._add(report.nodeid, error, refused, report.duration)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._add(report.nodeid, first_line(report.longrepr), COLLECTION, 0.0)

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self._found))

    def _add(self, name: str, error: str, refused: str, seconds: float) -> None:
        load = os.getloadavg()[0]
        self._found.setdefault(name, {"error": error, "refused": refused, "seconds": seconds, "load": load})


def first_line(longrepr: Any) -> str:
    """Return the first line of an error, or the last of a text that has none."""
    crash = getattr(longrepr, "reprcrash", None)
    lines = (str(crash.message) if crash else str(longrepr)).strip().splitlines() or [""]
    return (lines[0] if crash else lines[-1])[:300]
