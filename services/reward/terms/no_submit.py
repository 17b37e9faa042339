"""An attempt that was ended instead of ending itself."""

from __future__ import annotations

from shared.contracts.messages import StopReason
from shared.terms import Evidence, Found, Seen


def find(seen: Seen) -> Found:
    """Return 1 where a limit ended the attempt."""
    stop = seen.trajectory.stop
    return Found() if stop is StopReason.submitted else Found(1.0, [Evidence(f"ended by {stop.value}")])
