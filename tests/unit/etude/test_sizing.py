"""`etude plan`: the arithmetic of sizing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from etude import cli
from etude.plan import Load, in_flight, needed, plan, staleness

LOADS = st.builds(
    Load,
    step_seconds=st.floats(0.5, 3600),
    groups_per_step=st.integers(1, 512),
    group_size=st.integers(2, 64),
    sampled_tokens=st.floats(1, 1e5),
    session_speed=st.floats(1, 1e3),
)


@given(LOADS)
def test_the_gate_leaves_room_for_what_is_in_flight(load: Load) -> None:
    """(services/scheduler/gate.py) what is accepted or running fits into max_staleness + 1 steps."""
    a_step = load.groups_per_step * load.group_size
    assert in_flight(load)[2] + a_step <= (staleness(load) + 1) * a_step * (1 + 1e-9)


@given(LOADS)
def test_more_never_needs_fewer(load: Load) -> None:
    faster = replace(load, step_seconds=load.step_seconds / 2)
    for before, after in zip(plan(load)[:4], plan(faster)[:4], strict=True):
        assert int(after.number) >= int(before.number)


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6))
def test_nobody_is_busier_than_meant(demand: float, each: float) -> None:
    assert demand / (needed(demand, each) * each) <= 0.8 * (1 + 1e-6)


def test_the_demo_fits_on_its_machine() -> None:
    assert [row.number for row in plan(Load())[:4]] == ["1", "1", "1", "1"]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_figure_that_is_none_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match="--step-seconds: found"):
        Load(step_seconds=value)


def test_the_command_prints_it_and_names_a_bad_figure() -> None:
    if not cli.app.registered_commands:
        cli._front_door()
    done = CliRunner().invoke(cli.app, ["plan", "--step-seconds", "60", "--groups-per-step", "64"])
    assert done.exit_code == 0
    assert "inference replicas" in done.output
    bad = CliRunner().invoke(cli.app, ["plan", "--step-seconds", "0"])
    assert bad.exit_code != 0
    assert "--step-seconds: found 0; allowed: above 0" in bad.output + str(bad.stderr)
