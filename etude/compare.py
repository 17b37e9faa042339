"""`etude compare A.json B.json`: two measurements of `etude eval --json`, paired over the problems that both have.

A file is comparable if it keeps results by problem. Each row names the checksum of its problem, so that equal ids of
different problems are noticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from etude.demo.report import in_points, paired
from shared.settings import Told

PER_PROBLEM = "per_problem"
_WAY_OUT = "allowed: a file that `etude eval --json FILE` wrote"
# Key of the answer -> what a person reads.
SHARES = {
    "pass_at_1": "pass@1, temperature 1",
    "first_edit": "right with the first edit alone",
    "greedy": "pass@1, greedy",
}


class Incomparable(Told, ValueError):
    """The text names the file, what was found, and what is allowed."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one problem. `problem`: checksum of both its parts. `samples`: attempts at temperature 1 that have a
    verdict; `solved` and `first_edit`: how many of them were right at the end and after the first edit; `tokens`: what they
    sampled; `greedy`: the verdict of the greedy attempt, None: there is none; `errors`: attempts that infrastructure lost."""

    problem: str
    samples: int
    solved: int
    first_edit: int
    tokens: int
    greedy: bool | None
    errors: int


class _File(msgspec.Struct, frozen=True):
    per_problem: dict[str, Row] | msgspec.UnsetType = msgspec.UNSET


def rows(report: Mapping[str, Any], pairs: Sequence[tuple[Any, Any]]) -> dict[str, dict[str, Any]]:
    """Return what a file of figures keeps of each problem. `report`: an evaluator's; `pairs`: both parts of the problems that were
    measured."""
    checksums = {problem.id: _checksum(problem, hidden) for problem, hidden in pairs}
    kept = [name for name in Row.__struct_fields__ if name != "problem"]
    return {
        name: {"problem": checksums[name], **{field: row[field] for field in kept}}
        for name, row in report["problems"].items()
    }


def _checksum(problem: Any, hidden: Any) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode([problem, hidden], order="sorted"))


def read(path: Path) -> dict[str, Row]:
    """Return the results by problem. Raises Incomparable."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise Incomparable(f"{path}: cannot be read: {error.strerror}; {_WAY_OUT}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Incomparable(f"{path}: found no figures: {error}; {_WAY_OUT}") from None
    if isinstance(found.per_problem, msgspec.UnsetType):
        raise Incomparable(
            f"{path}: has no field {PER_PROBLEM!r}, as figures of a demo and of older versions; {_WAY_OUT}: measure again"
        )
    if wrong := next((name for name, row in found.per_problem.items() if not _possible(row)), None):
        raise Incomparable(f"{path}: problem {wrong!r}: more attempts were right than were made; {_WAY_OUT}")
    return found.per_problem


def _possible(row: Row) -> bool:
    return 0 <= row.solved <= row.samples and 0 <= row.first_edit <= row.samples


def compared(before: Mapping[str, Row], after: Mapping[str, Row]) -> dict[str, Any]:
    """Return the paired differences, after minus before, over the problems that both have. Raises Incomparable where ids
    of both name different problems, or where no problem is measured in both."""
    both = sorted(before.keys() & after.keys())
    other = [name for name in both if before[name].problem != after[name].problem]
    if other:
        raise Incomparable(
            f"{len(other)} of {len(both)} ids that both files have, such as {other[0]!r}, name different problems; allowed: two "
            "measurements of the same problems"
        )
    out: dict[str, Any] = {"only_before": len(before) - len(both), "only_after": len(after) - len(both)}
    for key in SHARES:
        a, b = (_evaluation(side, both, key) for side in (before, after))
        common = [name for name in both if a[name]["samples"] and b[name]["samples"]]
        if common:
            gain = paired({"problems": a}, {"problems": b}, key)
            out[key] = {"before": _mean(a, common, key), "after": _mean(b, common, key), "gain": gain}
    if "pass_at_1" not in out:
        raise Incomparable(
            f"no problem has results in both files: found {len(before)} and {len(after)} problems, {len(both)} ids in common; "
            "allowed: two measurements of the same problems (the same --problems FILE, or --pack DIR with its --split)"
        )
    return out


def _evaluation(side: Mapping[str, Row], names: Sequence[str], key: str) -> dict[str, dict[str, Any]]:
    """As the rows of an evaluator's report, with the figure under its name here."""
    if key == "greedy":
        return {name: {"samples": int(side[name].greedy is not None), key: bool(side[name].greedy)} for name in names}
    field = "solved" if key == "pass_at_1" else key
    return {name: {"samples": side[name].samples, key: getattr(side[name], field)} for name in names}


def _mean(rows: Mapping[str, Mapping[str, Any]], names: Sequence[str], key: str) -> float:
    return sum(rows[name][key] / rows[name]["samples"] for name in names) / len(names)


def lines(answer: Mapping[str, Any], before: Path, after: Path) -> list[str]:
    """Return the comparison as text, a line for each figure."""
    told = [f"{before} → {after}: {answer['pass_at_1']['gain']['problems']} problems in both"]
    for side, key in ((before, "only_before"), (after, "only_after")):
        if answer[key]:
            told.append(f"{side} alone has {answer[key]} more problems, which count for nothing here")
    for key, name in SHARES.items():
        if found := answer.get(key):
            told.append(f"{name:<32}{found['before']:7.1%} → {found['after']:6.1%}   {in_points(found['gain'])}")
    return told


def run(before: Path, after: Path, as_json: bool) -> int:
    """Print the comparison. Return the exit code."""
    from etude.demo.prepare import tell

    try:
        answer = compared(read(before), read(after))
    except Incomparable as error:
        tell(f"compare: {error}")
        return 2
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        from shared.visible import visible

        print(visible("\n".join(lines(answer, before, after))))
    return 0
