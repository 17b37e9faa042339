"""How long `make ci` takes and how much of the processor it uses, as its last run in this checkout measured.

It is not run here: `make ci` writes .cache/ci/last.json, and the same as its last line. `--log FILE` reads that line of a log.

python -m benchmarks.ci [--log FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import record

LAST = Path(".cache/ci/last.json")
LINE = "ci: measured "
WARM_MIN, SHARE = 30.0, 0.8


def measured(file: Path) -> dict[str, Any]:
    """Raises ValueError where the file tells of no run, OSError where it cannot be read."""
    text = file.read_text(errors="replace")
    lines = [line.removeprefix(LINE) for line in text.splitlines() if line.startswith(LINE)]
    if not lines and file.suffix != ".json":
        raise ValueError(f"{file}: found no line '{LINE}…', which `make ci` writes last")
    found: dict[str, Any] = json.loads(lines[-1] if lines else text)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--log", type=Path, metavar="FILE", default=LAST, help=f"what `make ci` wrote (default: {LAST})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--quick", action="store_true", help="the same: nothing is run")
    arguments = parser.parse_args(argv)
    try:
        found = measured(arguments.log)
    except (OSError, ValueError) as error:
        parser.error(f"{error}; run `make ci` first, or name its output by --log")
    rows = [
        record("ci.minutes", "all of `make ci`", [found["minutes"]], "min", f"at most {WARM_MIN:g} with warm caches"),
        record("ci.cpu_share", "processor used of what is there", [found["cpu_share"]], "", f"at least {SHARE:g}"),
        record("ci.second_chances", "tests that passed alone only", [len(found["second_chances"])], "tests", "0"),
    ]
    if arguments.json:
        records.write(arguments.json, rows)
    records.show(rows)


if __name__ == "__main__":
    main()
