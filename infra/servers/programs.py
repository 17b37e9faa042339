"""`python -m infra.servers programs` (`make programs`): the programs that tests start besides the servers.

Tests look for them and fetch nothing. Each is tried three times here, since a mirror may be away for a moment.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from infra.grafana import schema
from infra.servers import Unavailable, say
from infra.servers.debian import installed, program

COMMAND = "make programs"
TRIES = 3
FIRST_DELAY_S = 2.0  # doubles
SHELL = "chromium-headless-shell"  # without windows and menus: the same pages take a third of the processor time
BROWSERS = (SHELL, "chromium", "chromium-browser", "google-chrome")


def browser() -> str | None:
    """Return the path of this machine's Chromium, or None if it has none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _chromium() -> object:
    try:
        return installed(SHELL, SHELL)
    except Unavailable:  # no root, or a system that has none
        return browser() or installed("chromium", "chromium")


WANTED: dict[str, Callable[[], object]] = {
    "Prometheus": lambda: program("prometheus", "prometheus"),
    "promtool": lambda: program("promtool", "prometheus"),
    "Alertmanager": lambda: program("prometheus-alertmanager", "prometheus-alertmanager"),
    "Chromium": _chromium,
    "Grafana's schema": schema.build,
}


def fetch() -> None:
    """Fetch what is missing. Raises Unavailable, which names the program and this step."""
    for name, get in WANTED.items():
        tried(name, get)


def tried(name: str, get: Callable[[], object]) -> None:
    """Call `get` until it works, three times at most. Raises Unavailable with the last reason."""
    for number in range(TRIES):
        try:
            get()
            return
        except (Unavailable, OSError) as error:
            if number == TRIES - 1:
                raise Unavailable(f"{COMMAND}: cannot get {name} in {TRIES} tries. {error}") from error
            say(f"{name}: {error}; once more")
            time.sleep(FIRST_DELAY_S * 2**number)
