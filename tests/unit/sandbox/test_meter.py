"""Sums of processor time over a tree of processes that come and go, and where the kernel's own counts are."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shared import process as processes
from shared.sandbox import cgroups, meter
from shared.sandbox.inside.tree import Process
from shared.sandbox.meter import Sum


def process(own: int, waited: int = 0) -> Process:
    return Process(1, 5, 1, 1, False, own, waited)


def test_a_child_counts_once_while_it_lives_and_after_its_parent_waited_for_it() -> None:
    total = Sum()
    assert total.add({2: process(10)}) == 10
    assert total.add({2: process(12), 3: process(50)}) == 62
    assert total.add({2: process(13, waited=60)}) == 73
    assert total.lost == 0


def test_a_child_that_nobody_waited_for_counts_as_it_was_last_seen() -> None:
    total = Sum()
    total.add({2: process(10), 3: process(50), 4: process(70, waited=30)})
    assert total.add({2: process(10)}) == 10 + 150 - 2


def test_a_process_with_the_number_of_an_ended_one_is_another() -> None:
    total = Sum()
    total.add({2: process(10), 3: process(50)})
    assert total.add({2: process(10), 3: Process(1, 9, 1, 1, False, 1, 0)}) == 10 + 1 + 50 - 2 * 2


# (what happens, to which process, how many ticks); numbers are taken modulo those that live.
STEPS = st.lists(
    st.tuples(st.sampled_from(["work", "fork", "wait", "forget", "sample"]), st.integers(0, 9), st.integers(0, 90))
)


@given(STEPS)
def test_the_sum_is_never_more_than_what_was_used(steps: list[tuple[str, int, int]]) -> None:
    """A world in which the first process waits for the others or forgets them: the kernel's counts are exact there."""
    used = 0
    living = {2: (0, 0)}
    born, total = 2, Sum()
    for what, which, ticks in steps:
        pid = sorted(living)[which % len(living)]
        own, waited = living[pid]
        if what == "work":
            living[pid] = (own + ticks, waited)
            used += ticks
        elif what == "fork":
            born += 1
            living[born] = (0, 0)
        elif what in ("wait", "forget") and pid != 2:
            del living[pid]
            if what == "wait":
                living[2] = (living[2][0], living[2][1] + own + waited)
        elif what == "sample":
            assert total.add({pid: process(*one) for pid, one in living.items()}) <= used


@given(STEPS)
def test_nothing_is_missing_where_every_child_is_waited_for(steps: list[tuple[str, int, int]]) -> None:
    used = 0
    living = {2: (0, 0)}
    born, total = 2, Sum()
    for what, which, ticks in steps:
        pid = sorted(living)[which % len(living)]
        own, waited = living[pid]
        if what == "work":
            living[pid] = (own + ticks, waited)
            used += ticks
        elif what == "fork":
            born += 1
            living[born] = (0, 0)
        elif what == "wait" and pid != 2:
            del living[pid]
            living[2] = (living[2][0], living[2][1] + own + waited)
        else:
            assert total.add({pid: process(*one) for pid, one in living.items()}) == used


def test_the_clocks_of_cgroups_are_found_in_either_version(tmp_path: Path) -> None:
    for name in ("unified", "cpu,cpuacct/a"):
        (tmp_path / name).mkdir(parents=True)
    mounts = f"30 1 0:30 / {tmp_path}/unified rw - cgroup2 none rw\n"
    mounts += f"31 1 0:31 / {tmp_path}/cpu,cpuacct rw - cgroup none rw,cpu,cpuacct\n"
    found = cgroups.clocks("4:cpu,cpuacct:/a\n0::/\n", mounts)
    assert found == [(tmp_path / "unified", "cpu.stat"), (tmp_path / "cpu,cpuacct/a", "cpuacct.usage")]
    assert cgroups.clocks("0::/\n", "") == []


def test_only_groups_of_this_namespace_whose_owner_is_gone_are_removed(tmp_path: Path) -> None:
    me = processes.identity(os.getpid())
    assert me is not None
    mine = meter._of_machine(me)
    dead, before_me = f"{mine}999999999-1-ab", f"{mine}{me.pid}-{me.ticks - 1}-ab"
    other_boot = dead.replace(me.boot, "0" * len(me.boot))
    other_namespace = dead.replace(f".{me.namespace[5:-1]}-", ".1-")
    kept = {f"{mine}{me.pid}-{me.ticks}-ab", other_boot, other_namespace, f"{meter.PREFIX}1-0", f"{mine}x-1-ab"}
    assert len({dead, before_me, *kept}) == 7
    for name in (dead, before_me, *kept):
        (tmp_path / name).mkdir()
    meter.sweep(tmp_path)
    assert {folder.name for folder in tmp_path.iterdir()} == kept
