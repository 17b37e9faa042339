"""For all tests: shared fixtures; and how long an example takes on a busy machine says nothing about the code."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.failures import Failures
from tests.missing import pytest_terminal_summary
from tests.servers import platform_stores

__all__ = ["platform_stores", "pytest_terminal_summary"]

settings.register_profile("etude", deadline=None)
settings.load_profile("etude")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", help="file for what failed, and why (tests/run.py)")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--failures")
    if file and "PYTEST_XDIST_WORKER" not in os.environ:  # workers tell the process that started them
        config.pluginmanager.register(Failures(Path(file)))


# Whoever is started in the background of a shell without job control is deaf to Ctrl-C, and so is all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
