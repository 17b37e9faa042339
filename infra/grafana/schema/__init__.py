"""Do the dashboards hold against Grafana's own schema? `main.go` asks its Foundation SDK (Apache-2.0), pinned by go.sum."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
DASHBOARDS = HERE.parent / "dashboards"
WRONG = 1  # main.go's exit code when something does not hold


def wrong(paths: Iterable[Path]) -> list[str]:
    """What does not hold, one line each. Raises OSError: there is no Go, or the program cannot be built."""
    if not shutil.which("go"):
        raise OSError("go is not on the PATH; install Go 1.21 or newer: Grafana's schema is a Go module")
    program = HERE.parents[2] / ".cache" / "grafana-schema"
    built = subprocess.run(
        ["go", "build", "-mod=readonly", "-o", str(program), "."], cwd=HERE, capture_output=True, text=True
    )
    if built.returncode:
        raise OSError(f"{HERE}: go build: {built.stderr.strip()}")
    done = subprocess.run([str(program), *map(str, paths)], capture_output=True, text=True)
    if done.returncode not in (0, WRONG) or bool(done.returncode) != bool(done.stdout):
        raise OSError(f"{program} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.splitlines()
