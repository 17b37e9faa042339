"""What a service's `/metrics` says, as far as the flow picture needs it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Samples = Mapping[tuple[str, Labels], float]

WANTED = frozenset(
    {
        "etude_bus_deliveries_total",
        "etude_bus_delivery_age_seconds_sum",
        "etude_bus_delivery_age_seconds_count",
        "etude_scheduler_groups",
        "etude_scheduler_attempts",
        "etude_rollout_running_attempts",
        "etude_reward_in_hand_attempts",
        "etude_trainer_groups_in_hand",
        "etude_evaluator_open_evaluations",
        "etude_inference_serial",
        "sglang:num_running_reqs",
    }
)


def read(text: str) -> Samples:
    """The wanted series; what is no such text has none."""
    try:
        return {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name in WANTED
        }
    except (ValueError, KeyError, IndexError, RuntimeError):
        return {}


def total(samples: Iterable[Samples], name: str, **labels: str) -> float | None:
    """Sum over all services and series of this name that have these labels; None: nobody has one."""
    wanted = set(labels.items())
    values = [v for one in samples for (n, found), v in one.items() if n == name and wanted <= found]
    return sum(values) if values else None
