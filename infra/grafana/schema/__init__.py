"""Do the dashboards hold against Grafana's own schema? `main.go` asks its Foundation SDK (Apache-2.0), pinned by go.sum."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from infra.servers import Unavailable
from infra.servers.go import find_go

HERE = Path(__file__).resolve().parent
DASHBOARDS = HERE.parent / "dashboards"
PROGRAM = HERE.parents[2] / ".cache" / "grafana-schema"
WRONG = 1  # main.go's exit code when something does not hold


def build() -> None:
    """Build the program, with what Go fetches for it. Raises Unavailable: there is no Go, or it cannot be built."""
    go = find_go("Grafana's schema")
    built = subprocess.run(
        [str(go), "build", "-mod=readonly", "-buildvcs=false", "-o", str(PROGRAM), "."],
        cwd=HERE,
        capture_output=True,
        text=True,
    )
    if built.returncode:
        raise Unavailable(f"{HERE}: go build: {built.stderr.strip()}")


def wrong(paths: Iterable[Path]) -> list[str]:
    """Return what does not hold, one line each, by the program as it is built. Raises Unavailable: it is not, or it fails."""
    if not PROGRAM.exists():
        raise Unavailable(f"{PROGRAM}: not built; `make programs` builds it")
    done = subprocess.run([str(PROGRAM), *map(str, paths)], capture_output=True, text=True)
    if done.returncode not in (0, WRONG) or bool(done.returncode) != bool(done.stdout):
        raise Unavailable(f"{PROGRAM} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.splitlines()
