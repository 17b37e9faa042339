"""Rollout checkpoints in the ledger: what the next epoch continues from, what it stands on, and what is left of them."""

from __future__ import annotations

from sqlalchemy import Engine

from services.scheduler.desk import Desk
from services.scheduler.garbage import Known, left_behind
from services.scheduler.records import Attempt
from services.scheduler.store import Store
from shared.contracts import messages as m
from shared.contracts.ids import CHECKPOINT, attempt_prefix
from shared.contracts.run import Ref
from shared.ledger.transitions import AttemptState
from tests.unit.scheduler.test_scheduler_intake import RUN, Room, config


def checkpoint(attempt: Attempt, epoch: int, number: int) -> Ref:
    key = f"{attempt_prefix(RUN, attempt.id, epoch)}/{CHECKPOINT}{number:06d}-0.zst"
    return Ref(key=key, size=1, checksum="0" * 32)


def announced(room: Room, attempt: Attempt, epoch: int, number: int, oldest: int = 0) -> m.AttemptCheckpointed:
    return m.AttemptCheckpointed(
        run=RUN,
        key=room.key(attempt, epoch),
        worker="w",
        checkpoint=checkpoint(attempt, epoch, number),
        turns=number,
        oldest_version=oldest,
    )


def claim(room: Room, attempt: Attempt, epoch: int) -> None:
    room.tell(m.AttemptClaimed(run=RUN, key=room.key(attempt, epoch), worker="w"))


def lose(room: Room, attempt: Attempt, epoch: int, **said: object) -> list[m.RolloutRequested]:
    """Return what is asked for after the worker said that it lost the attempt."""
    room.tell(m.RolloutFailed(run=RUN, key=room.key(attempt, epoch), reason="gone", worker="w", **said))  # type: ignore[arg-type]
    room.now += 60
    room.tell()
    return [one for one in room.said if isinstance(one, m.RolloutRequested) and one.key.attempt == attempt.id]


def test_the_next_epoch_continues_from_the_newest_checkpoint_and_stands_on_its_versions(engine: Engine) -> None:
    room = Room(engine).begin()
    attempt = room.any()
    claim(room, attempt, 0)
    room.tell(announced(room, attempt, 0, 2), announced(room, attempt, 0, 1))  # the bus may turn them round
    assert attempt.checkpoint == checkpoint(attempt, 0, 2)
    (asked,) = lose(room, attempt, 0)
    assert (asked.key.epoch, asked.checkpoint) == (1, checkpoint(attempt, 0, 2))
    assert attempt.standing == 0 == attempt.oldest_version


def test_an_attempt_that_gets_on_uses_up_no_replacements(engine: Engine) -> None:
    room = Room(engine, config(replacements=1)).begin()
    attempt = room.any()
    for epoch in range(6):
        claim(room, attempt, epoch)
        room.tell(announced(room, attempt, epoch, epoch + 1))
        (asked,) = lose(room, attempt, epoch)
        assert (asked.key.epoch, asked.checkpoint) == (epoch + 1, checkpoint(attempt, epoch, epoch + 1))
    claim(room, attempt, 6)  # the one replacement since
    assert lose(room, attempt, 6) == []
    assert attempt.state is AttemptState.failed


def test_a_worker_that_leaves_names_a_checkpoint_that_is_not_read_of_yet(engine: Engine) -> None:
    room = Room(engine).begin()
    attempt = room.any()
    claim(room, attempt, 0)
    (asked,) = lose(room, attempt, 0, checkpoint=checkpoint(attempt, 0, 3), oldest_version=0)
    assert asked.checkpoint == checkpoint(attempt, 0, 3)
    room.tell(announced(room, attempt, 0, 4))  # of an epoch that is over
    assert attempt.checkpoint == checkpoint(attempt, 0, 3)


def test_a_scheduler_that_starts_again_knows_the_checkpoint(engine: Engine) -> None:
    room = Room(engine).begin()
    attempt = room.any()
    claim(room, attempt, 0)
    message = announced(room, attempt, 0, 1)
    room.tell(message)
    claimed = m.AttemptClaimed(run=RUN, key=message.key, worker="w")
    room.desk = Desk(Store(engine), lambda ref: room.run_config)
    room.tell(claimed)
    again = room.ws.attempts[attempt.id]
    assert again.checkpoint == checkpoint(attempt, 0, 1)


def test_checkpoints_stay_while_an_epoch_may_continue_from_them() -> None:
    keys = [
        f"runs/r/attempts/a/{epoch}/{CHECKPOINT}{name}" for epoch in range(2) for name in ("part-000001-0", "000001-0")
    ]

    def gone(**known: object) -> list[str]:
        return [one.key for one in left_behind("r", keys, {"a": Known(**known)})]  # type: ignore[arg-type]

    assert gone(epoch=1, over=False, kept=None, resumes=True) == []
    assert gone(epoch=1, over=False, kept=None, resumes=False) == keys[:2]
    assert gone(epoch=1, over=False, kept=1, resumes=True) == keys  # it has a trajectory
    assert gone(epoch=1, over=True, kept=None, resumes=True) == keys
