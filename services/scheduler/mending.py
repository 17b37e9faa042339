"""A version that no replica can read is published again. Pure: works on the working set, the clock is handed in.

Replicas rebuild a version from its full base before they report it (policies.applied, `damaged`), so trying again does not
help, and the next full base may be a long way off: without a replica in rotation no step leads there. The scheduler therefore
tells the trainer, with the run's status (runs.state, `damaged`), and the trainer publishes the same weights as a
full base under a new serial.

The same cure helps a ledger that was put back. It may have lost that a version was published, or that replicas serve it; both
were said once, and nothing else makes anybody say them again. The scheduler then asks for these weights again where it knows of a
version that it never heard the publication of, or finds no replica in rotation for a version that was published before it came;
both for UNHEARD_S.

The status may be said again or come late. The trainer obeys it only while the version is part of the chain that it builds on;
a trainer that starts begins with a full base anyway.
"""

from __future__ import annotations

from services.scheduler import rotation
from services.scheduler.working_set import WorkingSet
from shared.contracts.life import UNFINISHED

UNHEARD_S = 600.0  # a large model's replicas may take so long to start: asking earlier would publish a base for nothing


def mend(ws: WorkingSet, now: float, patience_s: float) -> set[str]:
    """Raise an alert about a damaged version, and tell the trainer where no replica is left in rotation. Return what the run
    waits on for that, as `decisions.decide` does."""
    reports = rotation.damaged(ws.replicas, ws.base)
    if ws.head.state not in UNFINISHED:  # the trainer listens in those states
        return set()
    if not reports:
        return _unheard(ws, now, patience_s)
    serial = max(one.serial for one in reports.values())
    reasons = sorted({one.reason for one in reports.values() if one.serial == serial})
    alone = not rotation.following(ws.replicas, ws.policies, now, patience_s, ws.silent(now))
    cure = (
        "no replica can load it: the trainer publishes its weights again, as a full base"
        if alone
        else f"{', '.join(sorted(reports)[:3])} cannot load it and is back with the next full base (train.base_every)"
    )
    what = f"version {serial} is damaged or lost in the object store; {cure}"
    ws.alert(now, "version_damaged", "critical" if alone else "warning", what, reasons)
    if not alone:
        return set()
    if ws.mending.tell(serial, now):
        ws.event(now, "policy.damaged", str(serial), reason=reasons[0])
        ws.tell_damaged(serial, now)
    return {f"the trainer to publish version {serial} again: {reasons[0]}"}


def _unheard(ws: WorkingSet, now: float, patience_s: float) -> set[str]:
    """Have the newest version published again if its publication was lost, or that a replica serves it."""
    known = max(ws.policies, default=-1)
    serial = max(known, ws.evident, *ws.steps.values(), *(one.serial for one in ws.replicas.values()))
    if ws.head.incarnation < 0 or serial < 0:
        return set()
    if serial > known:
        why = f"nobody has said that version {serial} was published"
    elif ws.policies[known][2] >= ws.loaded_at or rotation.rotation(ws.replicas, ws.policies, now, patience_s):
        ws.unheard_since = None
        return set()
    else:
        why = f"no replica has said that it serves version {serial}"
    ws.unheard_since = now if ws.unheard_since is None else ws.unheard_since
    if now - ws.unheard_since <= UNHEARD_S:
        return set()
    if ws.mending.tell(serial, now):
        what = f"{why} for {UNHEARD_S / 60:.0f} minutes, so the ledger may have lost it: the trainer publishes again"
        ws.alert(now, "ledger_behind", "warning", what, [f"version {serial}"])
        ws.event(now, "policy.damaged", str(serial), reason=why)
        ws.tell_damaged(serial, now)
    return {f"the trainer to publish again: {why}"}
