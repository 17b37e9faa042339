"""For all tests: shared fixtures; and how long an example takes on a busy machine says nothing about the code."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.failures import Failures
from tests.missing import pytest_terminal_summary
from tests.patience import limit
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("timeout")
        given = float(marker.args[0]) if marker and marker.args else float(config.getoption("timeout") or 0)
        if given:
            item.add_marker(pytest.mark.timeout(limit(given)), append=False)  # the first of its markers holds


# Whoever is started in the background of a shell without job control is deaf to Ctrl-C, and so is all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
