"""What a check found, and how a person is told. Standard library alone: infra/docker/check.py has nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    what: str
    ok: bool
    found: str
    way_out: str = ""


def report(findings: Iterable[Finding], well: str) -> int:
    """Prints a line per check, and the way out of what stands in the way; 1 if something does. `well`: said where nothing does."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    bad = 0
    for finding in findings:
        mark, colour = ("ok ", 32) if finding.ok else ("no ", 31)
        print(f"\033[{colour}m{mark}\033[0m" if coloured else mark, f"{finding.what}: {finding.found}", flush=True)
        if not finding.ok:
            bad += 1
            print(f"    way out: {finding.way_out}", flush=True)
    print(f"{bad} {'thing stands' if bad == 1 else 'things stand'} in the way." if bad else well)
    return 1 if bad else 0
