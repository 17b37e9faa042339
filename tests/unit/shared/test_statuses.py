"""Whatever is heard twice, late or only after compaction: readers of `runs.state` end where the scheduler is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.life import RunState
from shared.contracts.messages import RunStatus
from shared.contracts.run import Ref
from shared.contracts.statuses import Statuses

REF = Ref(key="k", size=1, checksum="0" * 32)


def said(number: int, state: str = "running", run: str = "r", started: float = 1.0) -> RunStatus:
    configs = [REF] if started else []
    return RunStatus(run=run, state=RunState(state), number=number, configs=configs, started=started)


def test_an_old_end_after_a_new_beginning_is_known_to_be_old() -> None:
    reader = Statuses()
    assert [reader.hear(one) for one in (said(7, "finished"), said(9), said(7, "finished"))] == [True, True, False]
    assert reader.of("r") == said(9)
    assert reader.of("other") is None


def test_runs_are_counted_apart_and_stand_in_the_order_of_their_starts() -> None:
    reader = Statuses()
    for one in (said(7, run="b", started=2.0), said(3, "finished", run="a"), said(8, run="refused", started=0.0)):
        assert reader.hear(one)
    assert [one.run for one in reader.started] == ["a", "b"]
    assert reader.followed == reader.of("b")
    assert Statuses().followed is None


def test_a_number_of_the_future_keeps_no_later_status_out() -> None:
    reader = Statuses(clock=lambda: 1_000.0)
    numbers = (1_000_000, 1 << 50, 1_000_001, 1_000_000)
    assert [reader.hear(said(number)) for number in numbers] == [True, True, True, False]


@given(st.data())
def test_a_reader_of_everything_and_one_of_what_compaction_has_left_know_the_same(data: st.DataObject) -> None:
    """Statuses of some runs; old ones come again anywhere after themselves; a reader may begin again in its middle. Compaction
    leaves the last message of each key, and any of the earlier ones."""
    log: list[RunStatus] = []
    for number in range(data.draw(st.integers(1, 12))):
        run = data.draw(st.sampled_from("abc"))
        state = data.draw(st.sampled_from(["running", "paused", "stopping", "finished"]))
        log.append(said(number, state, run, started=float(ord(run))))
        again = [one for one in log if one.run != run]  # of this run the scheduler that lives has just spoken
        log += data.draw(st.lists(st.sampled_from(again), max_size=2)) if again else []
    newest = {one.run: one for one in sorted(log, key=lambda one: one.number)}
    last = {one.run: index for index, one in enumerate(log)}
    whole, late = Statuses(), Statuses()
    for one in (*log, *log):
        whole.hear(one)
    assert {run: whole.of(run) for run in newest} == newest
    if all(log[index] == newest[run] for run, index in last.items()):
        kept = data.draw(st.sets(st.integers(0, len(log) - 1))) | set(last.values())
        for index in sorted(kept):
            late.hear(log[index])
        assert late.started == whole.started
