"""Requests of a sandbox to the network, in the trajectory of its attempt."""

import zstandard

from shared.contracts.messages import AttemptKey, Effort, StopReason
from shared.contracts.trajectory import Trajectory, pack, unpack
from shared.sandbox.contract import Decision

DECISIONS = [
    Decision(1.5, "pypi.test", 443, True, "allowed by 'pypi.test'"),
    Decision(2.5, "other.test", 80, False, "the host is not in the allow list"),
]


def trajectory(decisions: list[Decision]) -> Trajectory:
    key = AttemptKey(attempt="a", epoch=1, group="g", problem="p")
    return Trajectory(
        key=key, stop=StopReason.submitted, temperature=1.0, effort=Effort(), segments=[], decisions=decisions
    )


def test_a_trajectory_holds_the_decisions_of_the_egress_proxy():
    assert unpack(pack(trajectory(DECISIONS))).decisions == DECISIONS


def test_a_trajectory_without_decisions_has_the_bytes_that_it_had_before_there_were_any():
    packed = pack(trajectory([]))
    assert b"decisions" not in zstandard.ZstdDecompressor().decompress(packed)
    assert unpack(packed).decisions == []
