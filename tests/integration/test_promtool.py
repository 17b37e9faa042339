"""What Prometheus' own tool says of the configuration, of the alerts, and of the arithmetic of cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from infra.generate import DASHBOARDS
from infra.grafana import check, cost
from tests.watching import Program, need

PROMETHEUS = Path(__file__).resolve().parents[2] / "infra" / "prometheus"


@pytest.fixture(scope="module")
def promtool() -> Program:
    return need("promtool")


@pytest.mark.parametrize("arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_agrees(promtool: Program, arguments: tuple[str, ...]) -> None:
    promtool.agrees(*arguments, folder=PROMETHEUS)


# A platform that for an hour keeps one core of an engine and half a core of a trainer busy, makes 60 steps of 10 attempts,
# solves every fifth, and stores 72 GB.
PLATFORM = {
    'process_cpu_seconds_total{job="inference"}': "0+60x120",
    'process_cpu_seconds_total{job="trainer"}': "0+30x120",
    'process_cpu_seconds_total{job="prometheus"}': "0+60x120",  # no service of ours
    'process_resident_memory_bytes{job="trainer"}': "2e9x120",
    'up{job="inference",instance="a"}': "1x120",
    'up{job="inference",instance="b"}': "1x120",
    'up{job="trainer",instance="c"}': "1x120",
    'etude_trainer_steps_total{run="r-1"}': "0+1x120",
    'etude_trainer_tokens_total{run="r-1",kind="fed"}': "0+5000x120",
    'etude_trainer_tokens_total{run="r-1",kind="sampled"}': "0+2000x120",
    'sglang:generation_tokens_total{job="inference"}': "0+3000x120",
    'etude_reward_attempts_total{run="r-1",outcome="solved"}': "0+2x120",
    'etude_reward_attempts_total{run="r-1",outcome="unsolved"}': "0+8x120",
    'etude_trainer_phase_seconds_sum{run="r-1",phase="step"}': "0+40x120",
    'etude_trainer_phase_seconds_sum{run="r-1",phase="train"}': "0+30x120",
    "etude_grader_busy_seconds_total": "0+4x120",
    "etude_rollout_sandbox_wait_seconds_total": "0+10x120",
    'etude_scheduler_run_objects_bytes{run="r-1",kind="weights"}': "6e10x120",
    'etude_scheduler_run_objects_bytes{run="r-1",kind="trajectories"}': "1.2e10x120",
}
PRICES = {"core_hour": "0.1", "gpu_hour": "3", "gb_month": "0.02", "trainer_gpus": "8", "engine_gpus": "1"}
# 90 processor seconds a minute; eight GPUs at the trainer and one at each of two engines; a 730th of a month.
MONEY = {"processors": 1.5 * 0.1, "GPUs": 10 * 3, "objects": 72 * 0.02 / 730}
EXPECTED: dict[str, dict[str, float]] = {
    "Money": MONEY,
    "Money for": {
        "a step": sum(MONEY.values()) / 60,
        "an attempt": sum(MONEY.values()) / 600,
        "a solved attempt": sum(MONEY.values()) / 120,
    },
    "Processor seconds for": {"a step": 90, "an attempt": 9, "a solved attempt": 45},
    "Seconds for a solved attempt": {
        "engines, processor": 30, "trainer, steps": 20, "graders, busy": 2, "visible tests, waited for": 5,
    },
    "Tokens for a step": {"sampled by engines": 3000, "through the trainer": 5000, "trained": 2000},
    "Bytes stored for an attempt": {"weights": 1e8, "trajectories": 2e7},
    "Processor seconds by service": {"inference": 3600, "trainer": 1800},
    "Memory by service": {"trainer": 2e9},
}  # fmt: skip


ALIKE = {  # a panel over the last hour -> its like over the time shown, an hour too
    "Money for an hour": "Money",
    "Processor seconds for one": "Processor seconds for",
    "Seconds for a solved attempt, over an hour": "Seconds for a solved attempt",
    "Tokens for a step, over an hour": "Tokens for a step",
}


def test_cost_is_what_was_taken_over_what_was_got(promtool: Program, tmp_path: Path) -> None:
    board = DASHBOARDS["cost"]
    fields = [dataclasses.replace(field, value=PRICES[field.name]) for field in board.fields]
    asked = []
    for panel in board.panels():
        expected = EXPECTED[ALIKE.get(panel.title, panel.title)]
        for query in panel.queries:
            expr = check.filled(query.expr, fields)
            if (
                query.legend in expected
            ):  # two percent: before version 3 Prometheus counts both ends of an hour's minutes
                asked.append((f"abs(({expr}) / {expected[query.legend]!r} - 1) < bool 0.02", [{"value": 1}]))
            else:
                label = query.legend.strip("{}")
                samples = [{"labels": f'{{{label}="{one}"}}', "value": value} for one, value in expected.items()]
                asked.append((f"round({expr})", samples))
    tests = [{"expr": expr, "eval_time": "100m", "exp_samples": samples} for expr, samples in asked]
    series = [{"series": name, "values": values} for name, values in PLATFORM.items()]
    one = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    (tmp_path / "cost.yml").write_text(yaml.safe_dump({"tests": [one]}))
    promtool.agrees("test", "rules", "cost.yml", folder=tmp_path)


def test_what_nobody_got_has_no_cost_instead_of_an_infinite_one(promtool: Program, tmp_path: Path) -> None:
    expr = check.filled(cost.per(cost.processor("1h"), cost.solved("1h")))
    series = [{"series": name, "values": v if "solved" not in name else "0x120"} for name, v in PLATFORM.items()]
    one = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [{"expr": expr, "eval_time": "100m", "exp_samples": []}],
    }
    (tmp_path / "cost.yml").write_text(yaml.safe_dump({"tests": [one]}))
    promtool.agrees("test", "rules", "cost.yml", folder=tmp_path)
