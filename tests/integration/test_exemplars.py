"""From a point on a curve to an attempt: a real Prometheus, run as compose runs it, keeps the trace ids that services tell."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import yaml

from infra.grafana import check
from infra.servers.ports import free_port
from services.reward import metrics
from shared.contracts.tracing import trace_id
from shared.settings import ServiceSettings
from shared.telemetry import Health
from tests.patience import until
from tests.watching import Program, need, running

COMPOSE = yaml.safe_load((Path(__file__).resolve().parents[2] / "docker-compose.yml").read_text())


def test_the_trace_of_a_graded_attempt_is_found_beside_the_curve(tmp_path: Path) -> None:
    prometheus = need("prometheus")

    async def scenario() -> list[dict[str, str]]:
        async with Health("reward", ServiceSettings(state=tmp_path)) as health:
            metrics.note_graded("a-4567", 3.5)
            return await asyncio.to_thread(exemplars, prometheus, health.url.removeprefix("http://"), tmp_path)

    assert {"trace_id": trace_id("a-4567")} in asyncio.run(scenario())


def exemplars(prometheus: Program, target: str, folder: Path) -> list[dict[str, str]]:
    """Of the graded attempts, as a Prometheus with compose's flags keeps them."""
    scrape = {"job_name": "reward", "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (feature,) = [flag for flag in COMPOSE["services"]["prometheus"]["command"] if flag.startswith("--enable-feature")]
    address = f"127.0.0.1:{free_port()}"
    command = [str(prometheus.path), "--config.file=prometheus.yml", "--storage.tsdb.path=data", feature]
    with running([*command, f"--web.listen-address={address}"], folder, prometheus.environment):
        return until(lambda: asked(f"http://{address}"), "exemplars of graded attempts", 60, every=0.5)


def asked(url: str) -> list[dict[str, str]]:
    """The exemplars of the graded attempts; none while Prometheus does not answer yet."""
    now = time.time()
    try:
        found = check.call(
            url, "query_exemplars", query="etude_reward_grading_seconds_bucket", start=now - 60, end=now + 1
        )
    except OSError:
        return []
    return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]
