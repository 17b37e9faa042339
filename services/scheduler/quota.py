"""What a run's objects take, by kind, whether that is above its quota, and when to look again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from shared.contracts.ids import parse_attempt, parse_checkpoint, parse_policy
from shared.contracts.messages import Alert

QUOTA_EXCEEDED = "quota_exceeded"  # pauses the run that it is about, whatever its pause_on says
GB = 1e9
REST = 10.0  # × the time that a round took: so listing and deleting never become the load of a large run


class Kind(StrEnum):
    trajectories = "trajectories"
    routing = "routing"
    weights = "weights"  # of published versions, with their manifests
    checkpoints = "checkpoints"
    other = "other"  # the base policy, verdicts, evaluations, configurations


def kind(key: str) -> Kind:
    """Of an object below `runs/RUN/`."""
    if there := parse_attempt(key):
        folders = {"trajectory": Kind.trajectories, "routing": Kind.routing}
        return folders.get(there.name.partition("-")[0], Kind.other)
    if parse_policy(key):
        return Kind.weights
    return Kind.checkpoints if parse_checkpoint(key) else Kind.other


def by_kind(sizes: Mapping[str, int]) -> dict[Kind, int]:
    """Bytes of every kind, of objects with their bytes."""
    found = dict.fromkeys(Kind, 0)
    for key, size in sizes.items():
        found[kind(key)] += size
    return found


def exceeded(run: str, taken: Mapping[Kind, int], quota_gb: float) -> Alert | None:
    """None: there is no quota, or the run is within it."""
    total = sum(taken.values())
    if not quota_gb or total <= quota_gb * GB:
        return None
    parts = sorted(((size, of) for of, size in taken.items() if size), reverse=True)
    what = (
        f"its objects take {total / GB:.4g} GB ({', '.join(f'{of} {size / GB:.3g}' for size, of in parts)}), "
        f"schedule.quota_gb allows {quota_gb:g}. `etude ledger sweep {run} --versions N --delete` deletes the weights of all but "
        f"the last N versions; `etude reconfigure {run}` gives it a larger quota. Then `etude resume {run}`"
    )
    return Alert(run=run, name=QUOTA_EXCEEDED, severity="critical", what=what)


def rest_s(every_s: float, took_s: float) -> float:
    """Seconds from the end of a round, which took so long, to the beginning of the next."""
    return max(every_s - took_s, REST * took_s)
