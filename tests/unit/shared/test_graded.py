"""Where a verdict lies."""

from __future__ import annotations

from shared.contracts.graded import verdict_key
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Ref


def test_two_trajectories_of_one_epoch_have_a_verdict_each() -> None:
    key = AttemptKey(attempt="a", epoch=0, group="g", problem="p")
    first, second = (Ref(key="k", size=1, checksum=name * 32) for name in "ab")
    names = {verdict_key("r", key, trajectory) for trajectory in (first, second, None)}
    assert len(names) == 3
    assert verdict_key("r", key, first) == verdict_key("r", key, Ref(key="another", size=2, checksum="a" * 32))


def test_a_checksum_that_is_a_path_leads_nowhere_else() -> None:
    key = AttemptKey(attempt="a", epoch=0, group="g", problem="p")
    name = verdict_key("r", key, Ref(key="k", size=1, checksum="../../../elsewhere"))
    assert ".." not in name
    assert name.rpartition("/")[0] == verdict_key("r", key, None).rpartition("/")[0]
