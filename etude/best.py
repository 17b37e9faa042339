"""Which version of a run solves most of its held-out problems, of what was measured. Nothing is measured here.

Invariants
- Only like is compared with like: versions that were measured on the same problems, with as many attempts at each. Which
  were measured otherwise is told.
- Two that cannot be told apart are said to be so: where the paired 95 % interval over the problems holds zero.
- No service is asked: the reports lie in the object store, also after `etude down`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from etude.acting import Refused, Say, chosen
from etude.demo.conduct import tell
from etude.demo.report import figures_of, in_points, paired, within
from etude.hearing import past
from etude.standing import HEARD, Standing, Standings
from shared import objects as stores
from shared.contracts.ids import REPORT, evaluations, policy_prefix
from shared.objects import ObjectMissing, Objects
from shared.settings import ServiceSettings
from shared.weights import WeightsError, lost

BEST = "best"  # instead of a version's number

Report = Mapping[str, Any]  # of an evaluation, as services/evaluator writes it
Kind = tuple[frozenset[str], int]  # the problems, and the attempts at each


@dataclass(frozen=True, slots=True)
class Choice:
    """`alike`: version -> its report, of all that were measured as the best was. `gains`: the best beside each of the others,
    as `report.paired`. `otherwise`: "40 × 2" -> versions that were measured so, and not as the best was."""

    serial: int
    alike: Mapping[int, Report]
    gains: Mapping[int, dict[str, Any]]
    otherwise: Mapping[str, list[int]]

    @property
    def how(self) -> str:
        problems, samples = kind(self.alike[self.serial])
        return _how((problems, samples))

    @property
    def newest(self) -> int:
        """Of those that were measured alike."""
        return max(self.alike)

    @property
    def untold(self) -> list[int]:
        """Versions that the best cannot be told from."""
        return [serial for serial, gain in sorted(self.gains.items()) if not gain["ci95"] or gain["ci95"][0] <= 0.0]


def kind(report: Report) -> Kind:
    return frozenset(report["problems"]), int(report["figures"]["samples"])


def _how(of: Kind) -> str:
    return f"{len(of[0])} × {of[1]}"


def choose(run: str, reports: Iterable[Report]) -> Choice:
    """Of what was measured of `run`: where versions were measured in several ways, among those with the most attempts (and at
    least one other to compare with). Of a version that was measured twice in one way the first counts. Of equals the newest
    is the best. Raises Refused where there is nothing to choose from."""
    measured: defaultdict[Kind, dict[int, Report]] = defaultdict(dict)
    for report in reports:
        if tell({name: value for name, value in report["figures"].items() if value is not None}):
            measured[kind(report)].setdefault(report["serial"], report)
    several = {of: alike for of, alike in measured.items() if len(alike) > 1}
    if not several:
        there = "; ".join(f"{_how(of)}: {_versions(alike)}" for of, alike in measured.items())
        raise Refused(
            f"{run}: found measured {there or 'nothing'}; to choose, at least two versions must be measured alike: "
            f"`etude measure {run} --versions N,M`"
        )
    of = max(several, key=lambda of: (len(of[0]) * of[1], len(of[0]), len(several[of])))
    alike = several[of]
    best = max(alike, key=lambda serial: (alike[serial]["figures"]["pass_at_1"], serial))
    gains = {
        serial: paired(dict(report), dict(alike[best]), "solved") for serial, report in alike.items() if serial != best
    }
    otherwise: defaultdict[str, list[int]] = defaultdict(list)
    for other, found in measured.items():
        otherwise[_how(other)] += sorted(found.keys() - alike.keys())
    return Choice(best, alike, gains, {how: serials for how, serials in otherwise.items() if serials})


def told(run: str, choice: Choice, newest: int | None, *, gone: bool = False) -> Iterator[str]:
    """What a person reads. `newest`: the version that was published last, None: not known here; `gone`: the best one's weights
    are."""
    figures = figures_of(dict(choice.alike[choice.serial]))
    share = f"{figures['pass_at_1']:.1%}{within(figures['ci95'], '{:.1%}')}"
    yield (
        f"{run}: version {choice.serial}, {share} of {choice.how}, is the best of "
        f"{len(choice.alike)} that were measured so: {_versions(choice.alike)}."
    )
    last = "the newest" if choice.newest == newest else "the newest of these"
    if choice.newest == choice.serial:
        yield f"It is {last}."
    else:
        gain = choice.gains[choice.newest]
        apart = "it cannot be told from it" if choice.newest in choice.untold else "they can be told apart"
        yield (
            f"Beside {last}, version {choice.newest}: {in_points(gain)}, paired over {gain['problems']} problems; "
            f"{apart}."
        )
    if untold := [serial for serial in choice.untold if serial != choice.newest]:
        yield (
            f"Nor can it be told from {_versions(untold)}."
            if choice.newest in choice.untold
            else (f"It cannot be told from {_versions(untold)}.")
        )
    if newest is not None and newest not in choice.alike:
        yield f"The newest, version {newest}, was not measured so: `etude measure {run}` with the same --problems, --samples."
    for how, serials in choice.otherwise.items():
        yield f"Not compared, for measured otherwise ({how}): {_versions(serials)}."
    if gone:
        yield f"The weights of version {choice.serial} are deleted: it can be neither exported nor gone back to."


def _versions(serials: Iterable[int]) -> str:
    names = [str(serial) for serial in sorted(serials)]
    return f"version{'s' * (len(names) > 1)} {', '.join(names)}"


def reports(objects: Objects, run: str) -> Iterator[Report]:
    """Of every evaluation of the run that has ended, by name."""
    for key in sorted(objects.list(evaluations(run))):
        if key.endswith(f"/{REPORT}"):
            yield json.loads(objects.get(objects.head(key)))


def of_run(objects: Objects, run: str) -> Choice:
    """Raises Refused."""
    return choose(run, reports(objects, run))


def deleted(objects: Objects, run: str, serial: int) -> bool:
    """Whether the version can be built no more. The policy that a run begins with (0) lies with its base, too."""
    try:
        return bool(serial) and lost(objects, objects.head(f"{policy_prefix(run, serial)}/manifest.json")) is not None
    except (ObjectMissing, WeightsError):
        return True


def named(objects: Objects, run: str, version: str, say: Say) -> int | None:
    """The version that a person means by a number, by `best` or by nothing (None: the newest). Raises Refused."""
    if version == BEST:
        choice = of_run(objects, run)
        for line in told(run, choice, None):
            say(line)
        return choice.serial
    return _number(version) if version else None


def _number(version: str) -> int:
    if version.isascii() and version.isdigit():
        return int(version)
    raise Refused(f"version: found {version!r}; allowed: a number, or {BEST}")


async def meant(settings: ServiceSettings, run: str, version: str, *, followed: bool = False) -> tuple[str, int]:
    """The run and the version that a person means by a number (the run is as it was), or by `best`. `followed`: where no run is
    named, the one that was started last; else the only one that is not finished. Raises Refused, BusUnavailable."""
    if version != BEST:
        return run, _number(version)
    standing = await _standing(settings, run, followed=followed)
    return standing.run, of_run(stores.connect(settings.objects_url), standing.run).serial


async def show(settings: ServiceSettings, run: str, out: Path | None) -> None:
    """Prints it, of the run that was started last where none is named. Raises Refused, BusUnavailable."""
    standing = await _standing(settings, run, followed=True)
    objects = stores.connect(settings.objects_url)
    choice = of_run(objects, standing.run)
    gone = deleted(objects, standing.run, choice.serial)
    for line in told(standing.run, choice, standing.serial, gone=gone):
        typer.echo(line)
    if out:
        said = {
            "run": standing.run,
            "version": choice.serial,
            "step": standing.versions.get(choice.serial, 0),
            "deleted": gone,
            "figures": figures_of(dict(choice.alike[choice.serial])),
            "newest": choice.newest,
            "untold": choice.untold,
            "gains": {str(serial): gain for serial, gain in sorted(choice.gains.items())},
            "otherwise": choice.otherwise,
        }
        out.write_text(json.dumps(said, indent=2) + "\n")


async def _standing(settings: ServiceSettings, run: str, *, followed: bool = False) -> Standing:
    standings = Standings()
    await past(settings, HEARD, standings.hear, client="etude-measure")
    return chosen(standings, run or (standings.followed if followed else ""))
