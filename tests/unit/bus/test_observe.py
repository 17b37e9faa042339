"""Ages that are counted together are counted as one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from shared.bus.metrics import observe

BOUNDS = (0.5, 1.0, 2.5)


@given(st.lists(st.sampled_from([0.0, 0.4, 0.5, 0.75, 1.0, 2.5, 2.75, 1000.0])))
def test_together_as_one_by_one(values):
    registry = CollectorRegistry()
    together, each = (Histogram(name, "", ["who"], buckets=BOUNDS, registry=registry) for name in ("together", "each"))
    observe(together.labels("me"), values)
    for value in values:
        each.labels("me").observe(value)

    def figures(name: str) -> dict[str, float]:
        (family,) = [family for family in registry.collect() if family.name == name]
        return {
            f"{s.name.removeprefix(name)}{s.labels}": s.value for s in family.samples if not s.name.endswith("_created")
        }

    if values:
        assert figures("together") == figures("each")
