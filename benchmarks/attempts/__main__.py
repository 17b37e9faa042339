"""`python -m benchmarks.attempts [--count N]`: see benchmarks.attempts.lengths."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.attempts import lengths


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.attempts", description=lengths.__doc__)
    parser.add_argument("--count", type=int, default=500, metavar="N", help="attempts of each kind, 1 or more (500)")
    count = max(1, parser.parse_args().count)
    with tempfile.TemporaryDirectory() as folder:
        calm = lengths.played(Path(folder), count, "calm", kills=False)
        print(f"{'attempts':34} {'finished':>8} {'mean turns':>10} {'KS p':>8}")
        print(f"{'no kills':34} {len(calm):8} {sum(calm) / len(calm):10.1f} {'':>8}")
        ways = (("kills, from the last checkpoint", "kills", True), ("kills, from the beginning", "again", False))
        for what, name, resume in ways:
            found = lengths.played(Path(folder), count, name, kills=True, resume=resume)
            p = lengths.ks_p(calm, found) if found else 0.0
            print(f"{what:34} {len(found):8} {sum(found) / max(1, len(found)):10.1f} {p:8.2g}")


if __name__ == "__main__":
    main()
