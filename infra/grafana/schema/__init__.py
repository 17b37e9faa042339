"""Do the dashboards hold against Grafana's own schema? `main.go` asks its Foundation SDK (Apache-2.0), pinned by go.sum."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from infra.servers import Unavailable
from infra.servers.go import find_go

HERE = Path(__file__).resolve().parent
DASHBOARDS = HERE.parent / "dashboards"
WRONG = 1  # main.go's exit code when something does not hold


def wrong(paths: Iterable[Path]) -> list[str]:
    """What does not hold, one line each. Raises Unavailable: there is no Go, or the program cannot be built."""
    go = find_go("Grafana's schema")
    program = HERE.parents[2] / ".cache" / "grafana-schema"
    built = subprocess.run(
        [str(go), "build", "-mod=readonly", "-buildvcs=false", "-o", str(program), "."],
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    if built.returncode:
        raise Unavailable(f"{HERE}: go build: {built.stderr.strip()}")
    done = subprocess.run([str(program), *map(str, paths)], capture_output=True, text=True)
    if done.returncode not in (0, WRONG) or bool(done.returncode) != bool(done.stdout):
        raise Unavailable(f"{program} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.splitlines()
