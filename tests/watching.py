"""Prometheus' and Alertmanager's own programs, for tests that ask them.

Found on this machine or among what was fetched before. ETUDE_TEST_SERVERS=require (so does `make ci`) fetches what is missing
from Debian's packages, `auto` skips the test, as for the servers (tests/servers.py).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.servers import Unavailable
from infra.servers.debian import libraries, present, program
from tests import missing


@dataclass(frozen=True, slots=True)
class Program:
    path: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **libraries(self.path)}

    def agrees(self, *arguments: str, folder: Path) -> None:
        done = subprocess.run(
            [str(self.path), *arguments],
            cwd=folder, env=self.environment, capture_output=True, text=True, timeout=120,
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
        process.wait(30)


def need(name: str, package: str = "prometheus") -> Program:
    if os.environ.get("ETUDE_TEST_SERVERS") == "require":
        try:
            return Program(program(name, package))
        except Unavailable as error:
            pytest.fail(str(error))
    if path := present(name, package):
        return Program(path)
    missing.skip([name], f"apt-get install {package}")
