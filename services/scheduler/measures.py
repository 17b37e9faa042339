"""The scheduler's gauges of each run in memory."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Gauge

from services.scheduler import calibration
from services.scheduler.shares import Use
from services.scheduler.working_set import WorkingSet
from shared.contracts.life import RunState
from shared.ledger.transitions import AttemptState

GROUPS = Gauge("etude_scheduler_groups", "Groups by state.", ["run", "state"])
ATTEMPTS = Gauge("etude_scheduler_attempts", "Attempts that are not over.", ["run"])
GATE = Gauge(
    "etude_scheduler_gate",
    "What the gate decided by: version and oldest in steps; accepted, running, held (complete, without a place yet), lead (how "
    "many may be asked for ahead of the trainer) and room in groups.",
    ["run", "number"],
)
SLOTS = Gauge(
    "etude_scheduler_slots",
    "Slots of rollout workers: share (the part of 1 that the run is to have among the runs that run now), used (its part of what "
    "they used in the last minutes; a run alone has 1 of both) and held (attempts that workers have in hand).",
    ["run", "number"],
)
CALIBRATION = Gauge(
    "etude_scheduler_calibration",
    "Estimates of hardness against what came, over the newest groups: error (expected calibration error of the solve rate), brier, "
    "groups, silent_predicted and silent (shares of groups whose attempts all end alike).",
    ["run", "number"],
)
CALIBRATED = Gauge(
    "etude_scheduler_calibration_bin",
    "Of the attempts that were predicted in this bin of chances: their share, the mean that was predicted and the share solved.",
    ["run", "bin", "number"],
)
BY_RUN = (GROUPS, ATTEMPTS, GATE, SLOTS, CALIBRATION, CALIBRATED)
_reported: dict[str, int] = {}  # run -> how many groups its report of calibration is of


def measure(sets: Mapping[str, WorkingSet], measured: set[str]) -> set[str]:
    """Set the gauges of the runs in memory, and remove those of runs that were `measured` before and are let go. Return the runs
    that have gauges now."""
    for run in measured - sets.keys():
        _reported.pop(run, None)
        for gauge in BY_RUN:
            gauge.remove_by_labels({"run": run})
    for ws in sets.values():
        _gauge(ws)
    return set(sets)


def gate_words(ws: WorkingSet) -> str:
    """Return what the gate reckons with, in words; empty: it was not asked yet."""
    if not ws.gate:
        return ""
    numbers = ", ".join(f"{name} {value}" for name, value in ws.gate.items() if name != "room")
    return f"admitting {ws.gate['room']} groups; {numbers}{_use_words(ws.use)}"


def _use_words(use: Use | None) -> str:
    """Return what the run is to have of the slots and has, in words; empty: it runs alone."""
    if use is None:
        return ""
    return f"; share {use.share:.0%} of the slots, used {use.used:.0%} in the last minutes, holds {use.slots}"


def _gauge(ws: WorkingSet) -> None:
    GROUPS.labels(ws.id, "open").set(len(ws.open))
    GROUPS.labels(ws.id, "waiting").set(len(ws.waiting))
    GROUPS.labels(ws.id, "trained").set(len(ws.trained))
    ATTEMPTS.labels(ws.id).set(len(ws.attempts))
    for number, value in ws.gate.items():
        GATE.labels(ws.id, number).set(value)
    _measure_slots(ws)
    predictions = ws.hardness.calibration
    if _reported.get(ws.id) != predictions.changed:
        _reported[ws.id] = predictions.changed
        _calibrate(ws.id, calibration.report(predictions.newest))


def _measure_slots(ws: WorkingSet) -> None:
    alone = 1.0 if ws.head.state is RunState.running else 0.0
    use = ws.use or Use(alone, alone, sum(a.state is AttemptState.claimed for a in ws.attempts.values()))
    for number, value in (("share", use.share), ("used", use.used), ("held", use.slots)):
        SLOTS.labels(ws.id, number).set(value)


def _calibrate(run: str, found: calibration.Report) -> None:
    for number in ("error", "brier", "groups", "silent_predicted", "silent"):
        CALIBRATION.labels(run, number).set(getattr(found, number))
    CALIBRATED.remove_by_labels({"run": run})
    for one in found.bins:
        name = f"{min(calibration.BINS - 1, int(one.predicted * calibration.BINS)) / calibration.BINS:.1f}"
        CALIBRATED.labels(run, name, "share").set(one.attempts / found.attempts)
        CALIBRATED.labels(run, name, "predicted").set(one.predicted)
        CALIBRATED.labels(run, name, "solved").set(one.solved)
