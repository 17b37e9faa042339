"""For all tests: shared fixtures; and how long an example takes on a busy machine says nothing about the code."""

import signal

from hypothesis import settings

from tests.missing import pytest_terminal_summary
from tests.servers import platform_stores

__all__ = ["platform_stores", "pytest_terminal_summary"]

settings.register_profile("etude", deadline=None)
settings.load_profile("etude")

# Whoever is started in the background of a shell without job control is deaf to Ctrl-C, and so is all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
