"""Problems that a machine makes of Python projects: admitted an hour, and the share of the candidates.

`ETUDE_BENCH_SOURCES` names a folder of source archives or repositories (`pip download --no-deps --no-binary :all: NAME`). Left
out: .cache/sources. For each project: mutations, then deletions; for git repositories also commits. The time counts from the
start of the command, the first run of all tests included.

A machine that does other work makes wall clock mean little. So there is a second figure: what two cores would make in an hour if
they gave all their time, by the processor time of everything that ran (a cgroup's count; left out where there is none).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from benchmarks.records import Bench, record
from services.curator.sources import python as makers
from services.curator.sources.python.opened import made
from services.curator.sources.python.project import Project, SourceError, read_project
from shared.environments.repository.tree_sources import is_repository
from shared.sandbox.meter import KernelMeter

FOLDER = Path(os.environ.get("ETUDE_BENCH_SOURCES", ".cache/sources"))
CORES = 2
PARTS = ("mutations", "deletions", "commits")
MOST = {"mutations": 300, "deletions": 50, "commits": 20}


def measure(bench: Bench, meter: KernelMeter | None, kind: str, project: Project) -> None:
    """Make problems of one kind, and record the rate and the share."""
    label = project.name if kind == "mutations" else f"{project.name}.{kind}"
    if meter:
        meter.begin()
    found, _ = asyncio.run(made(makers.named(kind), project, most=bench.pick(MOST[kind], 8)))
    spent = meter.read().seconds if meter else 0.0
    admitted = len(found.pairs)
    what = f"{kind} of {project.label}: {admitted} of {found.candidates} candidates"
    gates = f"gate: {found.gates['whole']} whole, {found.gates['short']} short"
    bench.add(
        record(f"sources.admitted_per_hour.{label}", what, [admitted * 3600 / found.seconds], "problems/h", gates)
    )
    if spent:
        rate = admitted * 3600 * CORES / spent
        bench.add(
            record(
                f"sources.admitted_per_hour_of_two_cores.{label}",
                f"{what}, by processor time",
                [rate],
                "problems/h",
                gates,
            )
        )
    share = 100 * admitted / max(1, found.candidates)
    why = ", ".join(f"{count} {reason}" for reason, count in found.reasons.most_common(4))
    bench.add(record(f"sources.admitted_share.{label}", what, [share], "%", f"rejected: {why or 'none'}"))


def main() -> None:
    bench = Bench.start(__doc__, parts=PARTS)
    places = sorted(FOLDER.iterdir()) if FOLDER.is_dir() else []
    if not places:
        print(
            f"sources: nothing measured: no project in {FOLDER}; put source archives there, or set ETUDE_BENCH_SOURCES"
        )
    meter = None
    with contextlib.suppress(OSError):
        meter = KernelMeter(os.getpid())
    for place in places:
        for kind in PARTS:
            if not bench.wants(kind) or (kind == "commits" and not (place.is_dir() and is_repository(place))):
                continue
            try:
                measure(bench, meter, kind, read_project(str(place)))
            except SourceError as error:
                print(f"{place.name}, {kind}: {error}")
    bench.end()


if __name__ == "__main__":
    main()
