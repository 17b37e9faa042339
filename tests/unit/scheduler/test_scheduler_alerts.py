"""Whoever raises an alert, Prometheus hears of it from the scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client import REGISTRY

from shared.contracts import topics as t
from shared.contracts.messages import Alert
from tests.unit.etude.test_run_commands import A, folder


def counted(name: str, severity: str) -> float | None:
    labels = {"run": A, "name": name, "severity": severity}
    return REGISTRY.get_sample_value("etude_scheduler_alerts_total", labels)


def test_an_alert_of_any_service_is_counted_by_run_name_and_severity(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with folder(tmp_path) as here:
            await here.start(A)
            for name, severity in (("fewer_solved", "warning"), ("age_bound_breached", "critical")) * 2:
                await here.say(t.ALERTS, Alert(run=A, name=name, severity=severity, what=name))  # type: ignore[arg-type]
            for _ in range(600):
                found = (counted("fewer_solved", "warning"), counted("age_bound_breached", "critical"))
                if found == (2, 2):
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(found)

    asyncio.run(asyncio.wait_for(scenario(), 60))
