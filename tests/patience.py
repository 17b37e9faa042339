"""How long tests wait for what must happen. Not for windows that show that something does not happen, nor for what is measured."""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("ETUDE_TEST_PATIENCE") or (3 if os.environ.get("CI") else 1))
MOST_S = 240.0  # below the limit of a whole test


def patient(seconds: float) -> float:
    """Return the deadline, in seconds, on a machine that may be busy with other work."""
    return min(seconds * FACTOR, max(seconds, MOST_S))
