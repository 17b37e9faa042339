"""`python -m infra.grafana.schema`: every dashboard against Grafana's schema (needs Go). Exit code 1: something does not hold."""

from __future__ import annotations

import argparse
import sys

from infra.grafana.schema import DASHBOARDS, build, wrong
from infra.servers import Unavailable

if __name__ == "__main__":
    about = "Every dashboard against Grafana's schema (needs Go)."
    argparse.ArgumentParser(prog="python -m infra.grafana.schema", description=about).parse_args()
    paths = sorted(DASHBOARDS.glob("*.json"))
    try:
        build()
        lines = wrong(paths)
    except Unavailable as error:
        sys.exit(str(error))
    print("\n".join(lines) or f"{len(paths)} dashboards: every field is one that Grafana knows, none is missing")
    sys.exit(bool(lines))
