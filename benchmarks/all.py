"""Every benchmark one after the other, then one table: `python -m benchmarks.all [--quick] [--json FILE]`.

On a machine that does nothing else: they run in turn, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

NOT_BENCHMARKS = {"__init__", "all", "long_attempt", "loop", "records"}


def names() -> list[str]:
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in NOT_BENCHMARKS)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs every benchmark and prints one table.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller sizes")
    parser.add_argument("--json", type=Path, help="where all records go")
    options = parser.parse_args()
    records, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name in names():
            out = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(out)]
            print(f"benchmarks.{name} …", flush=True)
            done = subprocess.run([*command, "--quick"] if options.quick else command, stdout=subprocess.DEVNULL)
            if done.returncode or not out.exists():
                failed.append(name)
                continue
            files.append(str(out))
            records += json.loads(out.read_text())
        if files:
            subprocess.run([sys.executable, "-m", "benchmarks.records", *files], check=True)
    if options.json:
        options.json.write_text(json.dumps(records, indent=2) + "\n")
    for name in failed:
        print(f"benchmarks.{name} failed; run it alone to see why", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
