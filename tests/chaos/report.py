"""What became of it: a table by victim, the ledger's verdict, and a file for machines."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.scheduler.audit import Report
from tests.chaos.strikes import Outcome


def sound(outcomes: list[Outcome], report: Report | None, trouble: str = "") -> bool:
    return report is not None and report.sound and not trouble and not any(outcome.failed for outcome in outcomes)


def by_victim(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """One row for each kind of strike and victim; seconds of those that came back."""
    rows = []
    for kind, victim in dict.fromkeys((o.kind, o.victim) for o in outcomes):
        mine = [o for o in outcomes if (o.kind, o.victim) == (kind, victim)]
        times = [o.recovery_s for o in mine if not o.failed]
        rows.append(
            {
                "strike": kind,
                "victim": victim,
                "number": len(mine),
                "failed": sum(1 for o in mine if o.failed),
                "p50_s": statistics.median(times) if times else None,
                "max_s": max(times) if times else None,
            }
        )
    return rows


def show(outcomes: list[Outcome], report: Report | None, trouble: str, console: Console) -> None:
    table = Table("strike", "victim", box=None, header_style="bold")
    for name in ("number", "did not come back", "recovery p50, s", "max, s"):
        table.add_column(name, justify="right")
    for row in by_victim(outcomes):
        times = ["" if row[name] is None else f"{row[name]:.1f}" for name in ("p50_s", "max_s")]
        table.add_row(row["strike"], row["victim"], str(row["number"]), str(row["failed"]), *times)
    console.print(table)
    for outcome in outcomes:
        if outcome.failed:
            console.print(f"{outcome.kind} {outcome.victim}: {outcome.failed}", style="red", highlight=False)
        for name, note in outcome.notes.items():
            console.print(f"  {outcome.kind} {outcome.victim}: {name}: {note}", highlight=False)
    if trouble:
        console.print(trouble, style="red", highlight=False)
    if report is None:
        console.print("no audit: the ledger was not reached", style="red")
        return
    console.print(f"attempts: {report.attempts}; groups: {report.groups}; oldest trained: {report.oldest_age} steps")
    for what, reasons in report.reasons.items():  # given up, with a reason: no loss, but no training either
        for reason, number in reasons.items():
            console.print(f"  {what}: {number}: {reason}", highlight=False)
    for finding in report.findings:
        console.print(f"{finding.check}: {finding.what}: {finding.rows[:5]}", style="red", highlight=False)
    console.print(report.summary(), style="green" if report.sound else "red", highlight=False)


def write(path: Path, outcomes: list[Outcome], report: Report | None, trouble: str, settings: dict[str, Any]) -> None:
    found = {
        "settings": settings,
        "sound": sound(outcomes, report, trouble),
        "trouble": trouble,
        "by_victim": by_victim(outcomes),
        "strikes": [asdict(outcome) for outcome in outcomes],
        "audit": report.as_dict() if report else None,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
