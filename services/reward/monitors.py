"""The drift watch: what the policy takes to while its reward rises. Pure state, fed with scored attempts.

Each figure is compared between the first WINDOW groups of a run under one reward configuration and the latest WINDOW; the
share that is solved with that of its best WINDOW. A change counts where it is beyond its bound and beyond what chance does:
SIGMAS standard errors of the difference, by groups, since attempts at one problem are much alike (the variance of a mean of
clusters, Liang and Zeger 1986). An alarm sounds once, and again only after the figure has been back within half of its bound.

False alarms, by simulation of a policy that does not change (tests/unit/reward/test_monitors.py): none in 150 runs of 700 groups
with all six alarms, so fewer than 2 % of such runs have one (95 % confidence).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import hypot, sqrt
from typing import NamedTuple

from shared.contracts.messages import Alert, RolloutScored
from shared.contracts.run import Purpose

WINDOW = 128  # groups: a share of one half of problems of every hardness has a standard error of 3 to 4 points
SIGMAS = 4.0  # windows overlap and there are many: the best of them flatters itself by two
COMPARE_EVERY = 16  # attempts
EXAMPLES = 5
SOLVED_NOISE = 0.02  # a pass rate that rises by less has not risen
FIGURES = ("unconfirmed", "solved", "untested", "no_submit", "broken", "tokens")


@dataclass(frozen=True, slots=True)
class Sample:
    """One attempt, as far as drift shows in it."""

    attempt: str
    unconfirmed: float  # reward from anything but the tests
    solved: float
    untested: float
    no_submit: float
    broken: float
    tokens: float


@dataclass(slots=True)
class _Group:
    """`sums`: of each of FIGURES, as they come: windows of large groups are compared often."""

    samples: list[Sample] = field(default_factory=list)
    sums: list[float] = field(default_factory=lambda: [0.0] * len(FIGURES))

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        for i, name in enumerate(FIGURES):
            self.sums[i] += getattr(sample, name)


Groups = OrderedDict[str, _Group]


# figure -> (allowed change from the baseline, name of the alert, what it says); shares and rewards absolute, tokens and the
# share that is solved relative
_BOUNDS: dict[str, tuple[float, str, str]] = {
    "untested": (0.25, "untested_submits", "submits its last change without testing it"),
    "no_submit": (0.25, "unsubmitted_attempts", "is ended by a limit instead of submitting"),
    "broken": (0.25, "broken_tool_calls", "breaks tool calls"),
    "longer": (1.0, "longer_attempts", "samples more tokens per attempt"),
    "fewer": (
        0.5,
        "fewer_solved",
        "solves fewer of its problems",
    ),  # the collapse: at least half of what it could is gone
    "divergence": (0.15, "reward_without_passes", "gains reward that the tests do not confirm"),
}


class _Mean(NamedTuple):
    value: float
    error: float  # standard error


@dataclass(slots=True)
class _Watch:
    first: Groups = field(default_factory=OrderedDict)
    latest: Groups = field(default_factory=OrderedDict)
    seen: int = 0
    best: _Mean = field(default_factory=lambda: _Mean(0.0, 0.0))  # share that any WINDOW so far has solved
    sounding: set[str] = field(default_factory=set)


class DriftWatch:
    def __init__(self) -> None:
        self._watches: dict[tuple[str, str], _Watch] = {}

    def observe(self, scored: RolloutScored, findings: Collection[str]) -> list[Alert]:
        """Return the alerts that this attempt sets off. Evaluation attempts are not practice and do not count, nor does an
        attempt count twice. `findings`: names of the behaviour terms that found something."""
        if scored.key.purpose is not Purpose.train:
            return []
        watch = self._watches.setdefault((scored.run, scored.reward_config), _Watch())
        sample = Sample(
            attempt=scored.key.attempt,
            unconfirmed=scored.reward - scored.terms.get("solved", 0.0),
            solved=float(scored.verdict.solved),
            untested=float("untested_submit" in findings),
            no_submit=float("no_submit" in findings),
            broken=float("broken_tool_call" in findings),
            tokens=float(scored.effort.sampled_tokens),
        )
        group = scored.key.group
        known = watch.first.get(group) or watch.latest.get(group)
        if known is not None and any(one.attempt == sample.attempt for one in known.samples):
            return []
        if group in watch.first or len(watch.first) < WINDOW:
            watch.first.setdefault(group, _Group()).add(sample)
            return []
        watch.latest.setdefault(group, _Group()).add(sample)
        if len(watch.latest) > WINDOW:
            watch.latest.popitem(last=False)
        watch.seen += 1
        if len(watch.latest) < WINDOW or watch.seen % COMPARE_EVERY:
            return []
        return self._compare(scored.run, watch)

    def _compare(self, run: str, watch: _Watch) -> list[Alert]:
        was, now = _figures(watch.first), _figures(watch.latest)
        change = {name: now[name].value - was[name].value for name in ("untested", "no_submit", "broken")}
        change["longer"] = now["tokens"].value / max(1.0, was["tokens"].value) - 1.0
        watch.best = max(watch.best, was["solved"], now["solved"])
        change["fewer"] = 1.0 - now["solved"].value / watch.best.value if watch.best.value > SOLVED_NOISE else 0.0
        better = now["solved"].value - was["solved"].value > SOLVED_NOISE
        change["divergence"] = 0.0 if better else now["unconfirmed"].value - was["unconfirmed"].value
        alerts = []
        for name, (bound, alert, text) in _BOUNDS.items():
            figure = {"longer": "tokens", "divergence": "unconfirmed", "fewer": "solved"}.get(name, name)
            before = watch.best if name == "fewer" else was[figure]
            if change[name] <= bound / 2:
                watch.sounding.discard(name)
            elif change[name] > bound and name not in watch.sounding and _apart(before, now[figure]):
                watch.sounding.add(name)
                then = f"{before.value:.2f} in {'its best' if name == 'fewer' else 'the first'} {WINDOW} groups"
                what = f"the policy {text}: {then}, {now[figure].value:.2f} in the latest"
                examples = _examples(
                    (sample for group in watch.latest.values() for sample in group.samples),
                    figure,
                    most=name != "fewer",
                )
                alerts.append(Alert(run=run, name=alert, severity="warning", what=what, examples=examples))
        return alerts


def _figures(groups: Groups) -> dict[str, _Mean]:
    attempts = sum(len(group.samples) for group in groups.values())
    found = {}
    for i, name in enumerate(FIGURES):
        mean = sum(group.sums[i] for group in groups.values()) / attempts
        off = sum((group.sums[i] - len(group.samples) * mean) ** 2 for group in groups.values())
        found[name] = _Mean(mean, sqrt(off) / attempts)
    return found


def _apart(one: _Mean, other: _Mean) -> bool:
    return abs(one.value - other.value) > SIGMAS * hypot(one.error, other.error)


def _examples(samples: Iterable[Sample], figure: str, *, most: bool) -> list[str]:
    """The attempts in which it shows most, by the most or the least of the figure; of equal ones the latest."""
    shown = sorted(reversed(list(samples)), key=lambda sample: getattr(sample, figure), reverse=most)
    return [sample.attempt for sample in shown[:EXAMPLES]]
