"""Every benchmark one after the other, then one table: `python -m benchmarks.all [--quick] [--json FILE]`.

On a machine that does nothing else: they run in turn, each in a process of its own, and within a time limit. The records
are written after each: what comes later cannot cost what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import records
from shared.output import NotWritable, require_writable

# agent_sandboxes is the half of `sandboxes` that measures sandboxes of agents; ci reads what `make ci` measured; soak takes two
# hours: `make nightly` runs it
NOT_BENCHMARKS = {
    *(
        "__init__",
        "agent_sandboxes",
        "all",
        "ci",
        "gpu_attention",
        "gpu_models",
        "long_attempt",
        "policies",
        "records",
        "soak",
    )
}
LIMIT_S, QUICK_LIMIT_S = 3600.0, 600.0  # the longest take a quarter of an hour, and 5 minutes to compile a peer
GRACE_S = 60.0  # after Ctrl-C: servers that a benchmark started must end


def names() -> list[str]:
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in NOT_BENCHMARKS)


def command(name: str, *, quick: bool) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]


def failure(arguments: Sequence[str], limit_s: float, grace_s: float = GRACE_S) -> str:
    """Runs it, and returns why it failed; empty where it did not. Past the limit it is ended with all that it started."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s / 60:.3g} minutes, and ended"
    finally:
        if process.poll() is None:
            _end(process, grace_s)
    return f"ended with exit code {code}; run it alone to see why" if code else ""


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """As by Ctrl-C, so that it can stop its servers; then for good."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def collect(
    commands: Mapping[str, Sequence[str]], out: Path | None, limit_s: float
) -> tuple[list[records.Record], dict[str, str]]:
    """(all records, why each of the others has none). Every command takes `--json FILE`."""
    found: list[records.Record] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in commands.items():
            print(f"benchmarks.{name} …", flush=True)
            file = Path(folder) / f"{name}.json"
            if why := failure([*arguments, "--json", str(file)], limit_s):
                failed[name] = why
                print(f"benchmarks.{name}: {why}", file=sys.stderr, flush=True)
                continue
            try:
                found += records.read(file)
            except (OSError, ValueError) as error:
                failed[name] = f"wrote no records ({error})"
            if out:
                records.write(out, found)
    return found, failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs every benchmark and prints one table.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats, smaller sizes, and only peers that are installed already"
    )
    parser.add_argument("--json", type=Path, help="where all records go")
    options = parser.parse_args(argv)
    if options.json:
        try:
            require_writable(options.json, "--json")
        except NotWritable as error:
            parser.error(str(error))
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # begun in the background: what it starts would hear no Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    commands = {name: command(name, quick=options.quick) for name in names()}
    found, failed = collect(commands, options.json, QUICK_LIMIT_S if options.quick else LIMIT_S)
    records.show(found)
    for name, why in failed.items():
        print(f"benchmarks.{name} failed, no records of it: {why}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
