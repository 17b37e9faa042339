"""Measures whether a reward changes the demo's policy, and by how much.

term    a behaviour term comes in mid-run (`etude reconfigure`): what it counts before and after, on each seed. The policy
        changes by itself while it learns, so runs without the term say how much of that is the term's.
length  the length penalty on and off, seed by seed on the same problems: sampled tokens per solved attempt, and the pass rate.
        On: as the demo has it; and ten times as heavy, of failed attempts too.
both    both at once; the runs without the term are also those with the demo's penalty.

Each run is the demo's own platform (embedded bus and stores, the shipped base policy, all services) in a folder of its own.
The term is `new_name` (benchmarks/behaviour/term.py), which comes by an entry point, as a user's would.

    python -m benchmarks.behaviour both --seeds 0,1,2 --control-seeds 0,1 --parallel 9 --json b.json --plot b.png
    python -m benchmarks.behaviour both --table attempts.csv.gz --json b.json        # the figures again, of recorded attempts
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.behaviour import arms, measures, runs, table
from benchmarks.behaviour.runs import Arm, Place
from benchmarks.behaviour.table import Row
from shared.output import NotWritable, require_writable, write_whole

READ_S = 45.0  # before the limit: the services end, and the attempts are read
START_S, CLOSE_S = 150.0, 60.0  # besides practice, without a limit


@dataclass(frozen=True, slots=True)
class Plan:
    """`told`: arm and seed of each run. `limit`: of time.monotonic; what runs then is ended, and what it recorded counts."""

    told: Sequence[tuple[Arm, int]]
    minutes: float
    pack: Path
    state: Path
    parallel: int
    cores: int
    limit: float


def told(experiment: str, seeds: Sequence[int], control_seeds: Sequence[int]) -> list[tuple[Arm, int]]:
    """Return the runs of an experiment, those that decide most first."""
    found: list[tuple[Arm, int]] = []
    if experiment in ("term", "both"):
        found += [(arms.TERM, seed) for seed in seeds]
    found += [(arms.CONTROL, seed) for seed in control_seeds]
    if experiment in ("length", "both"):
        found += [(arm, seed) for arm in (arms.NO_LENGTH, arms.HEAVY) for seed in control_seeds]
    return found


def play(plan: Plan) -> list[Row]:
    """Run them, `parallel` at a time, and return all attempts. Report a run that fails, and continue with the others."""
    free: SimpleQueue[tuple[int, ...]] = SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    for place in range(plan.parallel):
        own = cores[place * plan.cores : (place + 1) * plan.cores]
        free.put(tuple(own) if plan.cores and len(own) == plan.cores else ())

    def one(arm: Arm, seed: int) -> list[Row]:
        name, held = f"{arm.name}-{seed}", free.get()
        state, started = plan.state / name, time.monotonic()
        try:
            runs.play(arm, seed, plan.minutes, Place(state, plan.pack, held, plan.limit - READ_S))
        except (OSError, runs.Failed) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        finally:
            free.put(held)
        try:
            rows = _read(state, arm, seed)
        except Exception as error:
            print(f"{name}: no attempts can be read: {error}", file=sys.stderr, flush=True)
            return []
        versions = max((row.version for row in rows), default=0)
        seconds = time.monotonic() - started
        print(f"{name}: {len(rows)} attempts up to version {versions} in {seconds:.0f} s", flush=True)
        return rows

    with ThreadPoolExecutor(plan.parallel) as pool:
        return [row for rows in pool.map(lambda run: one(*run), plan.told) for row in rows]


def _read(state: Path, arm: Arm, seed: int) -> list[Row]:
    """Return a run's attempts, read in a process of its own: a run has ten thousand, and several end at once."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(table.read, state, arm.name, seed, str(arm.start["reward"]["id"])).result()


def results(experiment: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures. A part that cannot be computed holds `error`."""
    of = measures.by_run(rows)
    found: dict[str, Any] = {
        "runs": [
            {"arm": arm, "seed": seed, "attempts": len(own), "versions": max(row.version for row in own)}
            for (arm, seed), own in of.items()
        ]
    }
    if experiment in ("term", "both"):
        controls = [own for (arm, _), own in of.items() if arm == arms.CONTROL.name]
        effects: dict[str, Any] = {}
        for (arm, seed), own in of.items():
            if arm == arms.TERM.name:
                effects[str(seed)] = _tried(lambda own=own: measures.term_effect(own, controls))
        whole = [effect["found"] for effect in effects.values() if "found" in effect]
        found["term"] = {"seeds": effects}
        for key in ("change", "effect"):
            if whole and all(effect[key] for effect in whole):
                found["term"][key] = measures.across([effect[key] for effect in whole])
    if experiment in ("length", "both"):
        found["length"] = {}
        for arm in (arms.CONTROL.name, arms.HEAVY.name):
            free = arms.NO_LENGTH.name
            pairs = {
                seed: (own, of[free, seed]) for (name, seed), own in of.items() if name == arm and (free, seed) in of
            }
            found["length"][arm] = {
                "seeds": {
                    str(s): _tried(lambda pair=pair: measures.length_effect([pair])) for s, pair in pairs.items()
                },
                "all": _tried(lambda pairs=pairs: measures.length_effect(list(pairs.values()))),
            }
    return found


def _tried(work: Any) -> dict[str, Any]:
    try:
        return dict(work())
    except ValueError as error:
        return {"error": str(error)}


def say(found: dict[str, Any]) -> None:
    """Print the figures that decide."""
    for seed, effect in found.get("term", {}).get("seeds", {}).items():
        if "error" in effect:
            print(f"term, seed {seed}: {effect['error']}")
            continue
        for name in ("found", "solved"):
            own = effect[name]
            line = f"term, seed {seed}, {name}: {own['before'][0]:.1%} -> {own['after'][0]:.1%}, change {_points(own['change'])}"
            if own["effect"]:
                line += f", control {_points(own['control_change'])}, effect {_points(own['effect'])}"
            print(line)
    for arm, length in found.get("length", {}).items():
        for name, effect in [*(("seed " + seed, one) for seed, one in length["seeds"].items()), ("all", length["all"])]:
            if "error" in effect:
                print(f"length, {arm}, {name}: {effect['error']}")
                continue
            per, free = (effect[side]["tokens_per_solved"][0] for side in ("with", "without"))
            print(
                f"length, {arm}, {name}, {effect['problems']} problems: tokens per solved {free:.0f} -> {per:.0f} with the penalty "
                f"({_percent(effect['tokens_per_solved'])}), solved {_points(effect['solved'])}"
            )


def _points(value: Sequence[float]) -> str:
    return "{:+.1f} points [{:+.1f}, {:+.1f}]".format(*(100 * number for number in value))


def _percent(value: Sequence[float]) -> str:
    return "{:+.1f} % [{:+.1f}, {:+.1f}]".format(*(100 * number for number in value))


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.behaviour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("experiment", choices=("term", "length", "both"))
    parser.add_argument("--seeds", type=_numbers, default=(0, 1, 2), metavar="N,M,…", help="of the runs with the term")
    parser.add_argument(
        "--control-seeds", type=_numbers, metavar="N,M,…", help="of all other runs; left out: as --seeds"
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="practice of each run, of which the term is there for 60 %% (8)"
    )
    parser.add_argument(
        "--limit", type=float, default=0.0, metavar="SECONDS", help="for everything; 0: as long as it takes"
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="K", help="runs at a time (1)")
    parser.add_argument(
        "--cores", type=int, default=0, metavar="N", help="cores that each run is held to; 0: to none (0)"
    )
    parser.add_argument("--pack", type=Path, default=Path(".cache/pack"), help="pack to practise on (.cache/pack)")
    parser.add_argument("--state", type=Path, help="new folder for the runs; left out: a temporary one")
    parser.add_argument(
        "--table", type=Path, metavar="FILE.csv.gz", help="attempts: written; read if it is there already"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves there")
    parser.add_argument(
        "--quick", action="store_true", help="one seed and one minute: shows that it works, and no effect"
    )
    options = parser.parse_args()
    try:
        for name in ("json", "plot", "table"):
            if path := getattr(options, name):
                require_writable(path, f"--{name}")
    except NotWritable as error:
        parser.error(str(error))
    if options.table and options.table.exists() and options.table.stat().st_size:
        rows = table.load(options.table)
    else:
        rows = _played(options, started)
    if not rows:
        sys.exit("no run recorded an attempt")
    found = results(options.experiment, rows)
    say(found)
    if options.json:
        write_whole(options.json, json.dumps(found, indent=1) + "\n")
    if options.plot and rows:
        from benchmarks.behaviour.plot import draw

        draw(rows, found, options.plot)


def _played(options: argparse.Namespace, started: float) -> list[Row]:
    seeds = options.seeds[:1] if options.quick else options.seeds
    control = seeds if options.control_seeds is None else options.control_seeds[: 1 if options.quick else None]
    minutes = 1.0 if options.quick else options.minutes
    wanted = told(options.experiment, seeds, control)
    rounds = -(-len(wanted) // options.parallel)
    limit = options.limit or rounds * (minutes * 60 + START_S + CLOSE_S)
    with tempfile.TemporaryDirectory(prefix="behaviour-") as temporary:
        state = (options.state or Path(temporary)).resolve()
        plan = Plan(wanted, minutes, options.pack, state, options.parallel, options.cores, started + limit)
        rows = play(plan)
    if options.table:
        table.write(options.table, rows)
    return rows


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


if __name__ == "__main__":
    main()
