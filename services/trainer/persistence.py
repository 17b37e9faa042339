"""How long the trainer insists on an object store that does not answer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

FIRST_DELAY_S, LAST_DELAY_S = 0.5, 15.0  # between tries to reach an object store that is away
PATIENCE_S = 600.0  # then the process ends, and the supervisor starts another from the last checkpoint

T = TypeVar("T")
log = structlog.get_logger()


def insist(call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Return the call's result, however long the object store is away within `patience_s` seconds: to give up would cost every
    step since the last checkpoint. Blocking; the call may be repeated."""
    delay, deadline = FIRST_DELAY_S, time.monotonic() + patience_s
    while True:
        try:
            return call()
        except OSError as error:
            if time.monotonic() + delay > deadline:
                raise
            log.warning("objects_unavailable", error=f"{type(error).__name__}: {error}", again_in_s=delay)
            time.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(LAST_DELAY_S, 2 * delay)
