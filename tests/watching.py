"""Prometheus' and Alertmanager's own programs, for tests that ask them.

Found on this machine or among what `make programs` fetched; a test fetches nothing. ETUDE_TEST_SERVERS=require (so does
`make ci`) fails the test where one is missing, `auto` skips it, as for the servers (tests/servers.py).
from tests.patience import patient
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.servers.debian import libraries, present
from infra.servers.programs import COMMAND
from tests import missing
from tests.patience import patient


@dataclass(frozen=True, slots=True)
class Program:
    path: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **libraries(self.path)}

    def agrees(self, *arguments: str, folder: Path) -> None:
        done = subprocess.run(
            [str(self.path), *arguments],
            cwd=folder, env=self.environment, capture_output=True, text=True, timeout=patient(120),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def running(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """In `folder`, where its log lies as well."""
    with (folder / f"{Path(command[0]).name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(patient(30))


def need(name: str, package: str = "prometheus") -> Program:
    return Program(there(present(name, package), name, COMMAND))


def there(found: Path | None, name: str, command: str) -> Path:
    """Return what was found. None: fail the test where nothing may be missing, else skip it, with the command that gets it."""
    if found is None and os.environ.get("ETUDE_TEST_SERVERS") == "require":
        pytest.fail(missing.reason([name], command))
    if found is None:
        missing.skip([name], command)
    return found
