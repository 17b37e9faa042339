"""The guard over a pack on this machine: digests and counts; see the package."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.guard.digest import count, exact, fold, missing, portable
from tests.guard.problems import FIXED_CONTEXT, fixed, of_pack
from tests.guard.world import play

TOKENIZER = Path(__file__).parents[2] / "etude" / "data" / "base" / "tokenizer.json"
SHOWN = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guard", description=__doc__)
    parser.add_argument(
        "--pack", type=Path, help="directory of a pack (`etude tasks mutate`); left out: the fixed problems"
    )
    parser.add_argument("--split", default="rl", help="split of the pack")
    parser.add_argument("--attempts", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write digests, counts and a digest for each attempt here")
    parser.add_argument(
        "--against", type=Path, help="compare with a file that --json wrote; exit code 1 if they differ"
    )
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as state:
        if args.pack is None:
            pairs, tokenizer, context = fixed(), None, FIXED_CONTEXT
        else:
            pairs, tokenizer, context = of_pack(args.pack, args.split), TOKENIZER, 512
        outcomes = play(Path(state), pairs, args.attempts, args.seed, tokenizer=tokenizer, context=context)
    seen = count(outcomes, context)
    attempts = {one.request.key.attempt: exact(one) for one in outcomes}
    report = {
        "portable": fold({one.request.key.attempt: portable(one) for one in outcomes}),
        "exact": fold(attempts),
        "counts": dict(sorted(seen.items())),
        "attempts": attempts,
    }
    for name, number in sorted(seen.items()):
        print(f"{number:8} {name}")
    print(f"portable {report['portable']}\nexact    {report['exact']}\n{time.monotonic() - started:.1f} s")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1))
    if absent := missing(seen):
        print("not covered:", ", ".join(absent))
    return compare(json.loads(args.against.read_text())["attempts"], attempts) if args.against is not None else 0


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> int:
    """Print which parts of which attempts differ. Return an exit code: 0 if none do."""
    different = {
        attempt: [part for part in after.get(attempt, {}) if before.get(attempt, {}).get(part) != after[attempt][part]]
        for attempt in sorted({*before, *after})
        if before.get(attempt) != after.get(attempt)
    }
    print(f"{len(different)} of {len(after)} attempts differ")
    for attempt, parts in list(different.items())[:SHOWN]:
        print(f"  {attempt}: {', '.join(parts) or 'only in one of them'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
