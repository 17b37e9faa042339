"""Why a problem was or was not drawn, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from shared.contracts.standing import ProbeWhy, ProblemWhy, Reason, State

STATES = {
    State.free: "It is free: it may be drawn.",
    State.running: "It was drawn, and its attempts are running.",
    State.waiting: "It was drawn, and its complete group waits for the trainer.",
    State.trained: "It was drawn and trained. No problem is used twice, so it is not drawn again.",
    State.given_up: "It was drawn, its groups were given up, and it is not drawn again.",
}


def sentences(found: ProblemWhy) -> Iterator[str]:
    """Say what became of the problem, what its chance of success is and why, and how often it is drawn."""
    one = found.standing
    yield f"{one.problem}: category {one.category}, relatives {one.cell}."
    yield STATES[one.state]
    if one.attempts:
        yield f"Of its last complete group, {one.solved} of {one.attempts} attempts were solved, by step {one.step}."
    if one.reason:
        yield f"Its last group was given up: {one.reason}."
    yield (
        f"An attempt is expected to succeed with a chance of {one.chance:.1%}, give or take {one.deviation:.1%}; "
        f"over the run's late attempts it is {found.mean:.1%}."
    )
    yield from map(_because, one.reasons)
    if found.probe is not None:
        yield _probed(found.probe)
    yield f"{found.silent:.0%} of groups like its are expected to end alike, all solved or none, and to teach nothing."
    yield from _drawing(found)


def _because(reason: Reason) -> str:
    rests = (
        f"rests on {reason.attempts:.1f} attempts, old ones counted less" if reason.attempts else "nothing known yet"
    )
    if reason.kind == "run":
        return f"- All attempts of the run: odds {reason.odds:.2f} to 1 ({rests})."
    way = "raises" if reason.odds > 1 else "lowers"
    what = {
        "tag": f"its tag {reason.of}",
        "relatives": f"how its relatives {reason.of} did against what their tags promised",
        "effort": "turns and thinking tokens of its relatives against the run's usual",
    }.get(reason.kind, reason.kind)
    if abs(reason.odds - 1) < 0.005:
        return f"- {what[0].upper()}{what[1:]} leaves the odds as they are ({rests})."
    return f"- {what[0].upper()}{what[1:]} {way} the odds {reason.odds:.2f}-fold ({rests})."


def _probed(probe: ProbeWhy) -> str:
    if probe.attempts:
        own = f"it solved {probe.solved} of {probe.attempts} attempts at this one"
    else:
        own = "it did not try this one"
    many = "relative" if probe.relatives == 1 else "relatives"
    near = f"; at {probe.relatives} {many}, {probe.relatives_solved} of {probe.relatives_attempts}"
    return (
        f"A probe before the run informed these figures. Of {probe.problems:,} problems that it tried, {own}"
        f"{near if probe.relatives else ''}."
    )


def _drawing(found: ProblemWhy) -> Iterator[str]:
    one = found.standing
    if not found.weighted:
        yield "Hardness does not decide in this run (schedule.hardness_sampling is false): all free problems are alike."
    elif found.power < 1:
        yield (
            f"The run is at step {found.step}, where draws are still partly uniform: weights count with {found.power:.0%} of "
            "their full power."
        )
    if one.state is not State.free:
        return
    if one.draw > 0:
        yield (
            f"Its weight is {found.relative:.2f} times that of an average free problem: the next draw takes it with a chance of "
            f"{one.draw:.2g}, one of {found.free:,} free problems."
        )
