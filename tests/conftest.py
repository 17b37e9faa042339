"""For all tests: shared fixtures; how long they may take, and in which order they run."""

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.failures import pytest_addoption, pytest_configure
from tests.missing import pytest_terminal_summary
from tests.order import by_length, is_worker, pytest_xdist_make_scheduler
from tests.patience import limit
from tests.servers import platform_stores

__all__ = [
    "platform_stores",
    "pytest_addoption",
    "pytest_configure",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
]

# How long an example takes on a busy machine says nothing about the code.
settings.register_profile("etude", deadline=None)
settings.load_profile("etude")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """A million objects are imported and none is garbage: to look for garbage among them takes a fifth of the time that collecting
    takes, and then a part of every test's."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_worker():
        by_length(items)
    for item in items:
        marker = item.get_closest_marker("timeout")
        given = float(marker.args[0]) if marker and marker.args else float(config.getoption("timeout") or 0)
        if given:
            item.add_marker(pytest.mark.timeout(limit(given)), append=False)  # the first of its markers holds


# Whoever is started in the background of a shell without job control is deaf to Ctrl-C, and so is all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
