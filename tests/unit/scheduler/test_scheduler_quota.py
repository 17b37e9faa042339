"""Which kind an object is of, when a run is above its quota, when its objects are looked at again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.quota import GB, QUOTA_EXCEEDED, REST, Kind, by_kind, exceeded, kind, rest_s
from shared.contracts.ids import attempt_prefix, checkpoint_prefix, policy_prefix

SIZES = st.dictionaries(st.sampled_from(Kind), st.integers(0, 10**13))


@pytest.mark.parametrize(
    ("key", "of"),
    [
        (f"{attempt_prefix('r', 'a-0', 1)}/trajectory-0123.safetensors.zst", Kind.trajectories),
        (f"{attempt_prefix('r', 'a-0', 1)}/routing-0123.safetensors.zst", Kind.routing),
        (f"{attempt_prefix('r', 'a-0', 1)}/verdict.json", Kind.other),
        (f"{policy_prefix('r', 3)}/0000-0000.bin", Kind.weights),
        (f"{policy_prefix('r', 3)}/manifest.json", Kind.weights),
        (f"{checkpoint_prefix('r', 0, 3)}/state.safetensors", Kind.checkpoints),
        ("runs/r/base/model.safetensors", Kind.other),
        ("runs/r/evals/policies/3/routing-0", Kind.other),
        ("runs/r/config.json", Kind.other),
    ],
)
def test_every_object_is_of_one_kind(key: str, of: Kind) -> None:
    assert kind(key) is of


@given(st.dictionaries(st.text("runs/policatemhkng-0123.", max_size=30), st.integers(0, 10**12)))
def test_no_byte_is_lost_or_counted_twice(sizes: dict[str, int]) -> None:
    found = by_kind(sizes)
    assert set(found) == set(Kind)
    assert sum(found.values()) == sum(sizes.values())


@given(SIZES, st.floats(0, 1e5))
def test_a_run_is_above_its_quota_by_what_it_takes_altogether(taken: dict[Kind, int], quota_gb: float) -> None:
    alert = exceeded("r", taken, quota_gb)
    assert (alert is not None) == (quota_gb > 0 and sum(taken.values()) > quota_gb * GB)


def test_the_alert_says_how_much_of_what_the_quota_and_the_way_out() -> None:
    taken = {Kind.trajectories: 2_000_000_000, Kind.weights: 9_500_000_000, Kind.routing: 0}
    alert = exceeded("r-1", taken, 10.0)
    assert alert is not None
    assert (alert.run, alert.name, alert.severity) == ("r-1", QUOTA_EXCEEDED, "critical")
    for said in (
        "11.5 GB (weights 9.5, trajectories 2)",
        "schedule.quota_gb allows 10",
        "`etude ledger sweep r-1 --versions N --delete`",
        "`etude resume r-1`",
    ):
        assert said in alert.what
    assert exceeded("r-1", taken, 11.5) is None
    assert exceeded("r-1", taken, 0.0) is None


@given(st.floats(0.01, 1e5), st.floats(0, 1e5))
def test_rounds_begin_so_often_as_told_and_never_take_more_than_an_eleventh_of_the_time(
    every_s: float, took_s: float
) -> None:
    rest = rest_s(every_s, took_s)
    assert rest >= REST * took_s
    assert rest + took_s >= every_s * (1 - 1e-9)
    assert rest + took_s <= max(every_s, (1 + REST) * took_s) * (1 + 1e-9)
