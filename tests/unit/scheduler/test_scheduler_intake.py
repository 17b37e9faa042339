"""Single messages: what is believed, what is refused, what comes too late."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, text

from services.scheduler.audit import audit, counts
from services.scheduler.desk import KEEP_FINISHED_S, Desk
from services.scheduler.records import Attempt
from services.scheduler.requesting import GROUPS_AHEAD
from services.scheduler.store import Store
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.life import RunState
from shared.contracts.run import Purpose, RunConfig, Sampling
from shared.ledger.transitions import AttemptState
from shared.objects import ObjectMissing
from tests.unit.scheduler.world import REF, RUN, Sent, config


class Room:
    """A desk and the messages of a run of which every attempt was asked for and none has begun."""

    def __init__(self, engine: Engine, run_config: RunConfig | None = None) -> None:
        self.engine, self.run_config = engine, run_config or config()
        self.now, self.offset = 1000.0, 0
        self.desk = Desk(Store(engine), lambda ref: self.run_config)

    def tell(self, *messages: Any, offset: int | None = None) -> list[str]:
        """The reasons for which messages were refused. `self.said` is what the desk wants published."""
        batch = []
        for message in messages:
            self.offset += 1
            topic = next(topic for topic in t.TOPICS.values() if isinstance(message, topic.types))
            batch.append(Sent(topic, message, self.offset if offset is None else offset))
        result = self.desk.handle(batch, self.now)
        self.said = [one.message for _, one in result.outbox]
        self.waits = result.waits
        return list(result.refused.values())

    def begin(self, problems: int = 40) -> Room:
        self.tell(
            m.ProblemAdmitted(
                run=RUN, pack=REF, pack_hidden=REF, problems={f"p{i}": ("debugging", "cell") for i in range(problems)}
            ),
            m.IncarnationStarted(run=RUN, incarnation=0, step=0, parent=-1),
            m.PolicyPublished(run=RUN, serial=0, incarnation=0, step=0, parent=-1, manifest=REF),
            m.PolicyApplied(run=RUN, replica="i", url="", serial=0),
            m.RunCommand(run=RUN, action="start", config=REF),
        )
        return self

    @property
    def ws(self) -> WorkingSet:
        return self.desk.sets[RUN]

    def any(self) -> Attempt:
        return next(a for a in self.ws.attempts.values() if a.state is AttemptState.requested)

    def key(self, attempt: Attempt, epoch: int = 0, purpose: Purpose = Purpose.train) -> m.AttemptKey:
        problem = self.ws.open[attempt.group].problem
        return m.AttemptKey(attempt=attempt.id, epoch=epoch, group=attempt.group, problem=problem, purpose=purpose)

    def scored(self, key: m.AttemptKey, reward: float = 1.0, **changed: Any) -> m.RolloutScored:
        values: dict[str, Any] = {
            "verdict": m.Verdict(solved=reward > 0, passed=1, total=1),
            "terms": {"solved": reward},
            "reward_config": "default",
            "trajectory": REF,
            "effort": m.Effort(turns=2),
            "stop": m.StopReason.submitted,
            "oldest_version": 0,
            **changed,
        }
        return m.RolloutScored(run=RUN, key=key, reward=reward, **values)

    def sql(self, query: str) -> list[Any]:
        with self.engine.begin() as connection:
            return [tuple(row) for row in connection.execute(text(query))]


@pytest.fixture
def room(engine: Engine) -> Room:
    return Room(engine).begin()


def test_nothing_is_asked_for_before_a_replica_serves_the_base_policy(engine: Engine) -> None:
    room = Room(engine)
    room.tell(
        m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems={"p": ("c", "x")}),
        m.RunCommand(run=RUN, action="start", config=REF),
        m.PolicyPublished(run=RUN, serial=0, incarnation=0, step=0, parent=-1, manifest=REF),
    )
    assert room.waits == {"an inference replica that serves this run's policy"}
    room.tell(m.PolicyApplied(run=RUN, replica="e", url="", pool="evaluation", serial=0))
    assert not room.said
    room.tell(m.PolicyApplied(run=RUN, replica="i", url="", serial=0))
    assert {type(said) for said in room.said} == {m.RolloutRequested}


def test_which_versions_were_promoted_is_kept_and_by_whom_and_said_twice_it_is_one_fact(room: Room) -> None:
    word = m.PolicyPromoted(run=RUN, serial=0, by="ann", reason="release")
    assert room.tell(word, m.PolicyPromoted(run=RUN, serial=7), word) == []
    with room.engine.begin() as connection:
        rows = connection.execute(
            text("SELECT subject, data FROM events WHERE kind = 'policy.promoted' ORDER BY subject")
        )
        found = [tuple(row) for row in rows]
    assert [subject for subject, _ in found] == ["0", "7"]
    assert '"ann"' in str(found[0][1]).replace("'", '"')
    assert room.tell(m.PolicyPromoted(run="r-unknown", serial=1)) == ["run 'r-unknown': the ledger never heard of it"]


def test_a_request_names_what_the_worker_needs(room: Room) -> None:
    requests = [said for said in room.said if isinstance(said, m.RolloutRequested)]
    assert len(requests) == GROUPS_AHEAD * 4  # of the (0 + 2 + 1) steps of 3 groups of 4 that the gate has room for
    first = requests[0]
    assert (first.pack, first.policy_floor, first.reward_config, first.key.epoch) == (REF, 0, "default", 0)
    assert len({r.seed for r in requests}) == len(requests)
    assert len({r.key.problem for r in requests}) == GROUPS_AHEAD


def test_the_first_verdict_wins(room: Room) -> None:
    key = room.key(room.any())
    room.tell(room.scored(key, reward=1.0))
    room.tell(room.scored(key, reward=0.0))
    assert room.ws.attempts[key.attempt].reward == 1.0
    assert room.sql("select reward from verdicts") == [(1.0,)]
    assert counts(room.engine, RUN)["rollouts.scored"] == 1


def test_a_verdict_before_the_claim_and_the_finish_is_a_verdict(room: Room) -> None:
    key = room.key(room.any())
    room.tell(room.scored(key), m.AttemptClaimed(run=RUN, key=key, worker="w"))
    assert room.ws.attempts[key.attempt].state is AttemptState.scored


def finished(key: m.AttemptKey, trajectory: m.Ref = REF, worker: str = "w", **changed: Any) -> m.RolloutFinished:
    values: dict[str, Any] = {"oldest_version": 0, "newest_version": 0, "effort": m.Effort(turns=2), **changed}
    return m.RolloutFinished(
        run=RUN, key=key, stop=m.StopReason.submitted, trajectory=trajectory, reward_config="default", pack_hidden=REF,
        oldest_kv_version=0, worker=worker, seconds=1.0, **values,
    )  # fmt: skip


ROLLED_OUT_TWICE = [m.Ref(key=f"trajectory-{name}", size=1, checksum=name * 32) for name in "ab"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("epochs", [(0, 0), (0, 1)], ids=["two workers hold one epoch", "the first was given up"])
def test_reward_trajectory_effort_and_versions_of_a_member_are_of_one_rollout(
    engine: Engine, order: tuple[int, ...], epochs: tuple[int, int]
) -> None:
    """Two rollouts of one attempt, and a verdict on each. In whatever order the four messages come, the first verdict wins."""
    room = Room(engine).begin()
    room.tell(m.PolicyPublished(run=RUN, serial=1, incarnation=0, step=1, parent=0, manifest=REF))
    attempt = room.any()
    if epochs[1]:
        room.tell(m.RolloutFailed(run=RUN, key=room.key(attempt), reason="the sandbox died", worker="w"))
        room.now += 5
        room.tell()
    truths = [
        {"trajectory": ref, "effort": m.Effort(turns=2 + i), "oldest_version": i, "newest_version": i}
        for i, ref in enumerate(ROLLED_OUT_TWICE)
    ]
    keys = [room.key(attempt, epoch) for epoch in epochs]
    said = [finished(key, worker=f"w{i}", **truths[i]) for i, key in enumerate(keys)]
    said += [room.scored(key, reward=float(i), **truths[i]) for i, key in enumerate(keys)]
    for index in order:
        assert room.tell(said[index]) == []
    won = next(i for i in order if i >= 2) - 2
    (group,) = [g for g in room.ws.open.values() if attempt in g.attempts]
    room.tell(*[room.scored(room.key(a)) for a in group.attempts if a is not attempt])
    (ready,) = [said for said in room.said if isinstance(said, m.GroupReady)]
    (member,) = [one for one in ready.members if one.attempt == attempt.id]
    assert (member.trajectory, member.reward, member.epoch) == (ROLLED_OUT_TWICE[won], float(won), epochs[won])
    assert (member.oldest_version, attempt.newest_version, attempt.effort) == (won, won, truths[won]["effort"])
    assert audit(engine, RUN, max_staleness=2).number("attempts") == 0


def test_the_audit_notices_a_reward_of_another_trajectory(room: Room) -> None:
    key = room.key(room.any())
    room.tell(room.scored(key))
    other = '{"key": "k", "size": 1, "checksum": "another"}'
    with room.engine.begin() as connection:
        connection.execute(text(f"update attempts set trajectory = '{other}' where attempt_id = '{key.attempt}'"))
    found = audit(room.engine, RUN, max_staleness=2).findings
    assert [finding.what for finding in found] == ["attempts whose reward is another trajectory's"]


def test_a_rollout_that_finished_after_its_attempt_was_given_up_counts_and_the_later_epoch_is_cancelled(
    room: Room,
) -> None:
    attempt = room.any()
    key = room.key(attempt)
    room.tell(m.RolloutFailed(run=RUN, key=key, reason="the sandbox died", worker="w"))
    room.now += 5
    room.tell()
    assert (attempt.epoch, attempt.state) == (1, AttemptState.requested)
    assert [(r.key.attempt, r.key.epoch) for r in room.said if isinstance(r, m.RolloutRequested)] == [(attempt.id, 1)]
    room.tell(m.AttemptClaimed(run=RUN, key=room.key(attempt, 1), worker="v"), finished(key))
    cancels = [(c.attempt, c.epoch, c.mode) for c in room.said if isinstance(c, m.AttemptCancel)]
    assert cancels == [(attempt.id, 1, "drop")]
    room.tell(room.scored(key))
    assert (attempt.epoch, attempt.rolled_out, attempt.state) == (1, 0, AttemptState.scored)
    assert counts(room.engine, RUN)["rollouts.scored"] == 1
    room.desk = Desk(Store(room.engine), lambda ref: room.run_config)
    room.tell()
    assert room.ws.attempts[attempt.id].rolled_out == 0
    assert audit(room.engine, RUN, max_staleness=2).sound


@pytest.mark.parametrize("restarted", [False, True])
def test_a_group_that_the_trainer_passed_over_is_no_breach_of_the_bound(engine: Engine, restarted: bool) -> None:
    """The trainer has set it aside. Its word on that comes later than its steps, on another topic."""
    room = Room(engine, config(max_staleness=1)).begin()
    said: list[Any] = []

    def ready(count: int) -> list[str]:
        groups = list(room.ws.open.values())[:count]
        room.tell(*[room.scored(room.key(a), oldest_version=room.ws.tip) for g in groups for a in g.attempts])
        said.extend(room.said)
        return [g.id for g in groups]

    def step(number: int, groups: list[str]) -> None:
        room.tell(
            m.PolicyPublished(run=RUN, serial=number, incarnation=0, step=number, parent=0, manifest=REF),
            m.PolicyApplied(run=RUN, replica="i", url="", serial=number),
            m.StepCommitted(run=RUN, incarnation=0, step=number, serial=number, groups=dict.fromkeys(groups, 0)),
        )
        said.extend(room.said)

    aside, *others = ready(4)
    step(1, others)
    step(2, ready(3))
    if restarted:
        room.desk = Desk(Store(room.engine), lambda ref: room.run_config)
        room.tell()
    ready(1)
    assert aside not in room.ws.waiting
    assert [s.name for s in said if isinstance(s, m.Alert)] == []
    refused = room.tell(m.GroupQuarantined(run=RUN, group=aside, reason="not finite", incarnation=0))
    assert refused == []
    assert room.sql(f"select state from groups where group_id = '{aside}'") == [("dropped",)]


def take_up_all(room: Room, version: int) -> None:
    """Let workers take up all first epochs on this version, until the gate admits no more."""
    while new := {a.id: (0, version) for a in room.ws.live() if a.epoch == 0 and a.oldest_version is None}:
        room.tell(m.AttemptHeartbeat(run=RUN, worker="w", attempts=new))


def score_others(room: Room, attempt: Attempt, count: int, version: int) -> list[str]:
    """Complete groups that this attempt is not in. Return their names."""
    others = [g for g in room.ws.open.values() if g.id != attempt.group][:count]
    room.tell(*[room.scored(room.key(a), oldest_version=version) for g in others for a in g.attempts])
    return [group.id for group in others]


def step(room: Room, number: int, groups: list[str]) -> None:
    room.tell(
        m.PolicyPublished(run=RUN, serial=number, incarnation=0, step=number, parent=number - 1, manifest=REF),
        m.PolicyApplied(run=RUN, replica="i", url="", serial=number),
        m.StepCommitted(run=RUN, incarnation=0, step=number, serial=number, groups=dict.fromkeys(groups, 0)),
    )


def test_a_complete_group_waits_for_its_place_while_an_older_attempt_needs_that_and_across_a_restart_too(
    engine: Engine,
) -> None:
    """Of steps of 3 groups. With a bound of 1, a group of version 0 must get one of the first 6 places."""
    room = Room(engine, config(max_staleness=1)).begin()
    take_up_all(room, 0)
    slow = room.ws.attempts[next(iter(room.ws.attempts))]
    first = score_others(room, slow, 5, version=0)
    assert list(room.ws.waiting) == first
    step(room, 1, first[:3])
    take_up_all(room, 1)
    held = score_others(room, slow, 3, version=1)
    assert sorted(held) == room.ws.held
    assert list(room.ws.waiting) == first[3:]
    assert room.ws.gate["held"] == 3
    (waits,) = room.waits
    assert f"step 2 has waited since 00:16:40 UTC for attempt {slow.id}, which would be too old" in waits
    room.desk = Desk(Store(engine), lambda ref: room.run_config)
    room.tell()
    assert room.ws.held == sorted(held)
    room.tell(*[room.scored(room.key(a)) for a in room.ws.open[slow.group].attempts])
    assert list(room.ws.waiting) == [*first[3:], slow.group, *held]
    announced = [said.group for said in room.said if isinstance(said, m.GroupReady)]
    assert announced == [slow.group, *held]


def test_a_rollout_of_an_earlier_epoch_that_the_gate_can_no_longer_admit_is_passed_over(engine: Engine) -> None:
    room = Room(engine, config(max_staleness=1)).begin()
    attempt = room.any()
    key = room.key(attempt)
    room.tell(m.RolloutFailed(run=RUN, key=key, reason="the sandbox died", worker="w"))
    step(room, 1, score_others(room, attempt, 3, version=0))
    room.now += 5
    room.tell()
    assert (attempt.epoch, attempt.policy_floor) == (1, 1)
    take_up_all(room, 1)
    score_others(room, attempt, 3, version=1)  # these take the last places of version 0
    room.tell(finished(key), room.scored(key))
    assert (attempt.state, attempt.reward) == (AttemptState.requested, None)


def test_a_later_epoch_stands_on_no_version_that_the_gate_has_no_places_for(engine: Engine) -> None:
    """A replica that joins late serves an older version than the lost attempt stood on."""
    room = Room(engine, config(max_staleness=1)).begin()
    attempt = room.any()
    step(room, 1, score_others(room, attempt, 3, version=0))
    room.tell(m.AttemptHeartbeat(run=RUN, worker="w", attempts={attempt.id: (0, 1)}))
    take_up_all(room, 1)
    ws = room.ws
    assert ws.may_stand_on(attempt.group, 0)
    score_others(room, attempt, 3, version=1)
    assert not ws.may_stand_on(attempt.group, 0)
    room.tell(
        m.PolicyApplied(run=RUN, replica="late", url="", serial=0),
        m.RolloutFailed(run=RUN, key=room.key(attempt), reason="the sandbox died", worker="w"),
    )
    room.now += 1
    room.tell()
    assert (attempt.epoch, attempt.standing) == (1, 1)


@pytest.mark.parametrize("again", ["grade", "sample"])
def test_grading_that_failed_is_done_again_and_the_attempt_is_sampled_again_only_if_there_is_nothing_to_grade(
    room: Room, again: Any
) -> None:
    attempt = room.any()
    key = room.key(attempt)
    room.tell(finished(key, ROLLED_OUT_TWICE[0], grading_s=60.0))
    failed = m.RolloutFailed(
        run=RUN, key=key, reason="no sandbox", worker="g", trajectory=ROLLED_OUT_TWICE[0], again=again
    )
    room.tell(failed)
    said: list[Any] = []
    for _ in range(30):
        room.now += 1
        room.tell()
        said += room.said
    requests = [r.key.epoch for r in said if isinstance(r, m.RolloutRequested) and r.key.attempt == attempt.id]
    graded = [(r.key.epoch, r.trajectory, r.grading_s, r.pack) for r in said if isinstance(r, m.RolloutFinished)]
    if again == "grade":
        assert (requests, graded) == ([], [(0, ROLLED_OUT_TWICE[0], 60.0, REF)])
        room.tell(
            *[s for s in said if isinstance(s, m.RolloutFinished)], room.scored(key, trajectory=failed.trajectory)
        )
        assert attempt.state is AttemptState.scored
    else:
        assert (requests, graded) == ([1], [])


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("trajectory", [REF, None], ids=["named", "of an earlier release"])
def test_a_grading_failure_that_is_read_before_its_rollout_holds_the_run_up_no_longer_than_another(
    room: Room, trajectory: m.Ref | None, restarted: bool
) -> None:
    attempt = room.any()
    key = room.key(attempt)
    failed = m.RolloutFailed(run=RUN, key=key, reason="no sandbox", worker="g", trajectory=trajectory, again="grade")
    room.desk.handle([Sent(t.ROLLOUTS_SCORED, failed, 100)], room.now)
    if restarted:
        room.desk = Desk(Store(room.engine), lambda ref: room.run_config)
    room.desk.handle([Sent(t.ROLLOUTS_FINISHED, finished(key), 101)], room.now)
    attempt = room.ws.attempts[attempt.id]
    said: list[Any] = []
    for _ in range(30):
        room.now += 1
        room.tell()
        said += room.said
    assert [r.key for r in said if isinstance(r, m.RolloutFinished)] == [key]  # to be graded again
    assert (attempt.epoch, attempt.state) == (0, AttemptState.finished)


@pytest.mark.parametrize("meanwhile", ["nothing", "a fork", "a restart"])
@pytest.mark.parametrize("order", ["its attempt was asked for again", "another is given up", "both"])
def test_grading_that_failed_before_its_rollout_was_read_is_done_again_although_the_rollout_counts_later(
    room: Room, order: str, meanwhile: str
) -> None:
    """Rollout b of epoch 0 counts in the end. Graders failed with it before the scheduler read that it had finished."""
    attempt = room.any()
    key = room.key(attempt)
    a, b = ROLLED_OUT_TWICE
    failed = m.RolloutFailed(run=RUN, key=key, reason="no sandbox", worker="g", trajectory=b, again="grade")
    no_use = m.RolloutFailed(run=RUN, key=key, reason="not readable", worker="g", trajectory=a, again="sample")
    died = m.RolloutFailed(run=RUN, key=key, reason="the sandbox died", worker="w")
    if order == "both":
        room.tell(finished(key, a), failed, no_use)
    else:
        room.tell(died if order == "its attempt was asked for again" else finished(key, a))
    if order != "another is given up":
        room.now += 1
        room.tell()
        assert attempt.epoch == 1
    if order != "both":
        room.desk.handle([Sent(t.ROLLOUTS_SCORED, failed, 900)], room.now)
    if meanwhile == "a fork":
        room.tell(m.IncarnationStarted(run=RUN, incarnation=1, step=0, parent=0))
    elif meanwhile == "a restart":
        room.desk = Desk(Store(room.engine), lambda ref: room.run_config)
    if order == "another is given up":
        room.desk.handle(
            [Sent(t.ROLLOUTS_SCORED, no_use, 901), Sent(t.ROLLOUTS_FINISHED, finished(key, b), 902)], room.now
        )
    else:
        room.tell(finished(key, b))
    said: list[Any] = []
    for _ in range(30):
        room.now += 1
        room.tell()
        said += room.said
    again = [s for s in said if isinstance(s, m.RolloutFinished)]
    assert {(s.key.epoch, s.trajectory) for s in again} == {(0, b)}
    assert room.ws.attempts[attempt.id].state is AttemptState.finished


def test_a_silent_worker_loses_its_attempts_and_a_heartbeat_keeps_them(room: Room) -> None:
    silent, alive = room.any(), None
    room.tell(m.AttemptClaimed(run=RUN, key=room.key(silent), worker="silent"))
    alive = room.any()
    room.tell(m.AttemptClaimed(run=RUN, key=room.key(alive), worker="alive"))
    for _ in range(8):
        room.now += 1
        room.tell(m.AttemptHeartbeat(run=RUN, worker="alive", attempts={alive.id: (0, 0)}))
    assert (silent.epoch, alive.epoch, alive.state) == (1, 0, AttemptState.claimed)


def test_a_scheduler_that_was_away_does_not_take_silence_for_death(room: Room) -> None:
    attempt = room.any()
    room.tell(m.AttemptClaimed(run=RUN, key=room.key(attempt), worker="w"))
    room.now += 3600
    room.tell()
    assert attempt.epoch == 0
    for _ in range(8):
        room.now += 1
        room.tell()
    assert attempt.epoch == 1


def test_a_heartbeat_tells_how_old_an_attempt_is(room: Room) -> None:
    attempt = room.any()
    room.tell(m.AttemptHeartbeat(run=RUN, worker="w", attempts={attempt.id: (0, -1)}))
    assert attempt.oldest_version is None
    room.tell(m.AttemptHeartbeat(run=RUN, worker="w", attempts={attempt.id: (0, 0), "somebody's": (0, 0)}))
    assert attempt.oldest_version == 0
    assert room.sql(f"select oldest_version from attempts where attempt_id = '{attempt.id}'") == [(0,)]


def test_evaluations_are_not_in_the_ledger(room: Room) -> None:
    key = m.AttemptKey(attempt="a-eval", epoch=0, group="g", problem="p", purpose=Purpose.evaluate)
    before = room.sql("select count(*) from events")
    assert room.tell(room.scored(key), m.AttemptClaimed(run=RUN, key=key, worker="w")) == []
    assert room.sql("select count(*) from events") == before


def test_strangers_are_refused_with_the_reason_and_stop_nobody(room: Room) -> None:
    stranger = m.AttemptKey(attempt="a-unknown", epoch=0, group="g", problem="p")
    future = room.key(room.any(), epoch=7)
    fine = room.key(room.any())
    refused = room.tell(room.scored(stranger), m.AttemptClaimed(run=RUN, key=future, worker="w"), room.scored(fine))
    assert refused == [
        f"attempt 'a-unknown' of run '{RUN}': the ledger never asked for it",
        f"attempt {future.attempt!r}: epoch 7 was never asked for, the newest is 0",
    ]
    assert room.ws.attempts[fine.attempt].state is AttemptState.scored
    unknown_run = m.StepCommitted(run="r-other", incarnation=0, step=1, serial=1, groups={})
    assert room.tell(unknown_run) == ["run 'r-other': the ledger never heard of it"]


def test_a_verdict_under_another_reward_configuration_is_refused(room: Room) -> None:
    refused = room.tell(room.scored(room.key(room.any()), reward_config="new"))
    assert "no group mixes two" in refused[0]


def test_a_new_reward_holds_for_new_groups_only_and_has_an_id_of_its_own(room: Room) -> None:
    old, old_groups = room.run_config, {group.id for group in room.ws.open.values()}
    again = m.RunCommand(run=RUN, action="reconfigure", config=m.Ref(key="n", size=1, checksum="e" * 32))
    room.run_config = msgspec.structs.replace(old, reward=msgspec.structs.replace(old.reward, solved=2.0))
    room.tell(again)
    assert room.ws.config == old
    room.run_config = msgspec.structs.replace(old, reward=msgspec.structs.replace(old.reward, id="second", solved=2.0))
    room.tell(again)
    room.tell(m.PolicyPublished(run=RUN, serial=1, incarnation=0, step=1, parent=0, manifest=REF))
    for group in list(room.ws.open.values())[:3]:
        room.tell(*[room.scored(room.key(a)) for a in group.attempts])
    trained = dict.fromkeys(room.ws.waiting, 0)
    room.tell(m.StepCommitted(run=RUN, incarnation=0, step=1, serial=1, groups=trained))
    assert {group.reward_config for group in room.ws.open.values() if group.id in old_groups} == {"default"}
    for group in list(room.ws.open.values()):
        room.tell(*[room.scored(room.key(a), oldest_version=1) for a in group.attempts])
    room.tell(m.PolicyApplied(run=RUN, replica="i", url="", serial=1))
    assert {group.reward_config for group in room.ws.open.values() if group.id not in old_groups} == {"second"}


@pytest.mark.parametrize("action", ["reconfigure", "resume"])
@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("sampling.temperature", {"sampling": Sampling(temperature=0.7)}),
        ("schedule.groups_per_step", {"schedule": config(groups_per_step=4).schedule}),
    ],
)
def test_what_is_fixed_for_the_life_of_a_run_is_refused_whoever_says_it_and_the_alert_names_the_field(
    room: Room, action: Any, field: str, changed: dict[str, Any]
) -> None:
    old = room.run_config
    if action == "resume":
        room.tell(m.RunCommand(run=RUN, action="pause"))
    room.run_config = msgspec.structs.replace(old, **changed)
    room.tell(m.RunCommand(run=RUN, action=action, config=m.Ref(key="n", size=1, checksum="e" * 32)))
    assert (room.ws.config, room.ws.head.config) == (old, REF)
    (alert,) = [said for said in room.said if isinstance(said, m.Alert)]
    assert (alert.name, alert.what) == ("configuration", "n cannot be scheduled")
    assert alert.examples[0].startswith(f"{field} is fixed for the life of a run; what may change: ")


def test_more_is_asked_for_as_workers_claim_and_never_beyond_the_gate(room: Room) -> None:
    asked = [len(room.ws.open)]
    while len(asked) < 12:
        waiting = [a for g in room.ws.open.values() for a in g.attempts if a.state is AttemptState.requested]
        room.tell(*[m.AttemptClaimed(run=RUN, key=room.key(a), worker="w") for a in waiting])
        asked.append(len(room.ws.open))
    assert asked[0] == GROUPS_AHEAD < asked[1] <= asked[-1] == 9  # (0 + 2 + 1) steps of 3 groups


def test_a_group_with_too_few_survivors_is_dropped_and_its_problem_returns(engine: Engine) -> None:
    room = Room(engine, config(replacements=0, group_size=4, group_min=3)).begin(problems=GROUPS_AHEAD)
    group = next(iter(room.ws.open.values()))
    lost = [room.key(a) for a in group.attempts[:2]]
    room.tell(*[room.scored(room.key(a)) for a in group.attempts[2:]])
    room.tell(*[m.RolloutFailed(run=RUN, key=key, reason="no sandbox", worker="w") for key in lost])
    room.now += 1
    room.tell()
    again = [g for g in room.ws.open.values() if g.problem == group.problem]
    assert [(g.number, g.id != group.id) for g in again] == [(1, True)]
    assert room.sql("select state from attempts where state not in ('requested')") == [
        ("failed",), ("failed",), ("dropped",), ("dropped",)
    ]  # fmt: skip


def test_a_group_closes_with_the_survivors_when_replacements_are_used_up(engine: Engine) -> None:
    room = Room(engine, config(replacements=1, group_size=4, group_min=2)).begin()
    group = next(iter(room.ws.open.values()))
    keys = [room.key(a) for a in group.attempts]
    room.tell(*[room.scored(key) for key in keys[1:]])
    for epoch in range(2):
        attempt = group.attempts[0]
        room.tell(m.RolloutFailed(run=RUN, key=room.key(attempt, epoch), reason="no sandbox", worker="w"))
        room.now += 5
        room.tell()
    ready = [said for said in room.said if isinstance(said, m.GroupReady)]
    assert [(r.group, [member.attempt for member in r.members]) for r in ready] == [
        (group.id, [key.attempt for key in keys[1:]])
    ]
    assert ready[0].reward_config == group.reward_config == "default"


def test_a_quarantined_group_is_not_trained_and_its_problem_may_return(room: Room) -> None:
    group = next(iter(room.ws.open.values()))
    room.tell(*[room.scored(room.key(a)) for a in group.attempts])
    room.tell(m.GroupQuarantined(run=RUN, group=group.id, reason="not finite"))
    assert group.id not in room.ws.waiting
    assert room.sql(f"select state, reason from groups where group_id = '{group.id}'") == [
        ("quarantined", "not finite")
    ]


def test_an_attempt_over_its_time_limit_is_told_to_submit(engine: Engine) -> None:
    room = Room(engine, config(lease_s=50.0)).begin()
    room.desk = Desk(Store(engine), lambda ref: room.run_config, attempt_s=10)
    room.tell()
    attempt = room.any()
    room.tell(m.AttemptClaimed(run=RUN, key=room.key(attempt), worker="w"))
    said = []
    for _ in range(14):
        room.now += 1
        room.tell(m.AttemptHeartbeat(run=RUN, worker="w", attempts={attempt.id: (0, 0)}))
        said += [s for s in room.said if isinstance(s, m.AttemptCancel)]
    assert [(s.attempt, s.mode) for s in said] == [(attempt.id, "submit")]


def test_pause_and_resume_delivered_again_do_not_count_again(room: Room) -> None:
    pause, resume = (m.RunCommand(run=RUN, action=a) for a in ("pause", "resume"))
    room.tell(pause, offset=50)
    room.tell(resume, offset=51)
    assert room.ws.head.state == "running"
    room.tell(pause, offset=50)
    assert room.ws.head.state == "running"
    room.tell(pause, offset=52)
    assert room.ws.head.state == "paused"


def test_every_command_is_answered_with_how_the_run_stands_and_a_growing_number(room: Room) -> None:
    def answer(action: str, **more: Any) -> tuple[str, str, bool]:
        command = m.RunCommand(run=RUN, action=action, by="alice", **more)  # type: ignore[arg-type]
        room.tell(command)
        (mine, *others) = statuses(room)
        numbers.extend(one.number for one in (mine, *others))
        assert mine.answers == command.id
        assert (mine.configs, mine.started > 0, [one.answers for one in others]) == ([REF], True, [""] * len(others))
        return (mine.state.value, mine.by, mine.drain)

    numbers: list[int] = []
    assert answer("resume") == ("running", "", True)  # it runs already, since nobody said who starts it
    assert answer("pause", drain=False) == ("paused", "alice", False)
    since = room.ws.resumed_at
    room.now += 5
    assert answer("pause") == ("paused", "alice", True)
    assert answer("start", config=REF) == ("paused", "alice", True)  # it has begun
    assert room.ws.resumed_at == since
    assert answer("stop") == ("stopping", "alice", True)
    assert (room.ws.head.state, room.ws.by) == ("finished", "alice")  # nothing was in hand
    assert numbers == sorted(set(numbers))
    assert all(numbers)


def statuses(room: Room) -> list[m.RunStatus]:
    return [said for said in room.said if isinstance(said, m.RunStatus)]


def test_going_back_to_a_version_is_recorded_with_who_said_so_and_told_to_the_trainer_also_by_the_next_scheduler(
    room: Room,
) -> None:
    command = m.RunCommand(run=RUN, action="rollback", serial=3, by="alice", reason="it collapsed")
    assert room.tell(command) == []
    assert room.ws.head.state == "running"
    ((data,),) = room.sql("select data from events where kind = 'run.rollback'")
    assert "alice" in str(data)
    before = statuses(room)[-1]
    assert before.rollback == m.Rollback(3, command.id)
    room.desk = Desk(Store(room.desk.store.engine), lambda ref: room.run_config)
    room.now += 1
    room.tell()
    (again,) = statuses(room)  # how the runs stand that it found
    assert again == msgspec.structs.replace(before, number=again.number, answers="")
    assert again.number > before.number
    assert room.tell(m.RunCommand(run=RUN, action="rollback", serial=None)) == [
        "run 'r-test': rollback without a serial or an id"
    ]


def test_a_status_that_comes_after_a_newer_one_is_followed_by_how_the_run_stands(room: Room) -> None:
    """By a scheduler that had stood still. Compaction keeps the last message of a run."""
    (started,) = statuses(room)
    room.tell(m.RunCommand(run=RUN, action="pause"))
    (paused,) = statuses(room)
    room.tell(started, paused)
    assert statuses(room) == []
    room.tell(started)
    (again,) = statuses(room)
    assert (again.state, again.number > paused.number) == ("paused", True)
    room.tell(again)
    assert statuses(room) == []


def alert(name: str, run: str = RUN) -> m.Alert:
    return m.Alert(run=run, name=name, severity="warning", what="it solves nothing any more")


def test_an_alert_that_the_configuration_names_pauses_the_run_once_and_says_why(engine: Engine) -> None:
    room = Room(engine, config(pause_on=["fewer_solved"])).begin()
    room.tell(alert("longer_attempts"), alert("fewer_solved", run="r-unknown"))
    assert room.ws.head.state == "running"
    assert room.tell(alert("fewer_solved"), offset=70) == []
    assert room.ws.head.state == "paused"
    (pause,) = statuses(room)
    assert (pause.state, pause.drain, pause.by) == ("paused", False, "scheduler")
    assert "it solves nothing any more" in pause.reason
    room.tell(m.RunCommand(run=RUN, action="resume", by="alice"))
    room.tell(alert("fewer_solved"), offset=70)  # delivered again
    assert room.ws.head.state == "running"
    room.tell(alert("fewer_solved"), offset=71)  # said again
    assert room.ws.head.state == "paused"


def test_without_being_named_an_alert_pauses_nothing(room: Room) -> None:
    assert room.tell(alert("fewer_solved"), alert("gradient_not_finite")) == []
    assert room.ws.head.state == "running"


def test_a_run_pauses_when_its_trainer_skips_step_after_step_without_naming_the_alert(room: Room) -> None:
    room.tell(alert("gradient_spike"))
    assert room.ws.head.state == "running"
    room.tell(alert("steps_skipped"))
    assert room.ws.head.state == "paused"
    (pause,) = statuses(room)
    assert (pause.state, pause.drain) == ("paused", False)  # the trainer too


def test_above_its_quota_a_run_pauses_without_naming_the_alert_and_goes_on_with_another_quota(room: Room) -> None:
    room.tell(alert("quota_exceeded"))
    assert room.ws.head.state == "paused"
    (pause,) = statuses(room)
    assert (pause.state, pause.drain, pause.by) == ("paused", False, "scheduler")
    room.run_config = config(quota_gb=-1.0)
    room.tell(m.RunCommand(run=RUN, action="reconfigure", config=REF))
    assert room.ws.config.schedule.quota_gb == 0.0
    (objection,) = [said for said in room.said if isinstance(said, m.Alert)]
    assert objection.examples == ["schedule.quota_gb: found -1.0; allowed: 0 (no quota) or more"]
    room.run_config = config(quota_gb=20.0)
    room.tell(m.RunCommand(run=RUN, action="reconfigure", config=REF))
    assert (room.ws.head.state, room.ws.config.schedule.quota_gb) == ("paused", 20.0)
    answer = statuses(room)[-1]
    assert (answer.state, answer.drain, answer.configs) == ("paused", False, [REF])  # the trainer still holds
    room.tell(m.RunCommand(run=RUN, action="resume", by="alice"))
    assert room.ws.head.state == "running"


def test_an_impossible_configuration_ends_the_run_with_the_reason(engine: Engine) -> None:
    room = Room(engine, config(group_min=9))
    room.tell(m.RunCommand(run=RUN, action="start", config=REF))
    assert "schedule.group_min: found 9" in room.sql("select reason from runs")[0][0]
    assert [(said.state, said.configs) for said in statuses(room)] == [("finished", [])]


@pytest.mark.parametrize("error", [ObjectMissing("runs/r-test/config.json"), ValueError("key '../x': no key")])
def test_a_configuration_that_cannot_be_read_ends_the_run_with_the_reason(engine: Engine, error: Exception) -> None:
    room = Room(engine)

    def missing(_: Any) -> RunConfig:
        raise error

    room.desk = Desk(Store(engine), missing)
    room.tell(m.RunCommand(run=RUN, action="start", config=REF))
    assert room.sql("select state from runs") == [("finished",)]


def test_a_message_that_the_tables_refuse_goes_to_the_dead_letters_alone(room: Room) -> None:
    group = next(iter(room.ws.open.values()))
    room.tell(*[room.scored(room.key(a)) for a in group.attempts])
    fine = m.StepCommitted(run=RUN, incarnation=0, step=1, serial=1, groups={group.id: 0})
    reused = m.StepCommitted(run=RUN, incarnation=0, step=2, serial=1, groups={})
    problem = m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems={"later": ("c", "x")})
    refused = room.tell(fine, reused, problem)
    assert len(refused) == 1
    assert "serial" in refused[0]
    assert room.sql("select step from steps") == [(1,)]
    assert "later" in room.ws.catalogue


@pytest.mark.parametrize("following", [1, 2])
def test_a_replica_that_does_not_follow_leaves_the_rotation(room: Room, following: int) -> None:
    """2: the trainer died between the manifest of serial 1 and its word, and the next one went on."""
    room.tell(m.PolicyApplied(run=RUN, replica="dead", url="", serial=0))
    room.tell(m.PolicyPublished(run=RUN, serial=following, incarnation=0, step=1, parent=0, manifest=REF))
    room.tell(m.PolicyApplied(run=RUN, replica="i", url="", serial=following))
    assert set(room.ws.rotation(room.now, 60)) == {"dead", "i"}
    assert set(room.ws.rotation(room.now + 61, 60)) == {"i"}


def test_a_restarted_scheduler_knows_what_the_old_one_knew(room: Room) -> None:
    group, other = list(room.ws.open.values())[:2]
    room.tell(*[room.scored(room.key(a)) for a in group.attempts])
    room.tell(m.AttemptClaimed(run=RUN, key=room.key(other.attempts[0]), worker="w"))
    old, new = room.ws, Desk(Store(room.engine), lambda ref: room.run_config)
    new.handle([], room.now)
    found = new.sets[RUN]
    found.head.last_message -= 1  # it has announced how the run stands
    assert found.head == old.head
    assert {a.id: (a.epoch, a.state, a.worker) for a in found.attempts.values()} == {
        a.id: (a.epoch, a.state, a.worker) for a in old.attempts.values()
    }
    assert list(found.waiting) == list(old.waiting)
    assert found.catalogue.free == old.catalogue.free
    assert found.standing() == old.standing()
    kinds = (["debugging"], ["cell"])
    assert [x.tolist() for x in found.hardness.posterior(*kinds)] == [
        x.tolist() for x in old.hardness.posterior(*kinds)
    ]


@pytest.mark.parametrize(("newest", "announced"), [(2, True), (3, False)])
def test_after_a_fork_a_groups_newest_version_may_be_its_farthest(room: Room, newest: int, announced: bool) -> None:
    """Steps 2 and 3 are cut off, and the group has its place in step 3, which trains the weights of step 2. A token of the
    dead step 2 is one step back to the fork and one forward; of the dead step 3 it is two back: three, over the bound."""
    publish = [
        m.PolicyPublished(run=RUN, serial=serial, incarnation=0, step=serial, parent=serial - 1, manifest=REF)
        for serial in (1, 2, 3)
    ]
    room.tell(publish[0], m.StepCommitted(run=RUN, incarnation=0, step=1, serial=1, groups={}), *publish[1:])
    *ahead, group = list(room.ws.open.values())[:4]
    for other in ahead:
        room.tell(*[room.scored(room.key(a), oldest_version=1, newest_version=1) for a in other.attempts])
    *keys, last = [room.key(a) for a in group.attempts]
    room.tell(*[room.scored(key, oldest_version=2, newest_version=2) for key in keys])
    room.tell(room.scored(last, oldest_version=2, newest_version=newest))
    room.desk = Desk(Store(room.engine), lambda ref: room.run_config)  # what counts is what was written down
    room.tell(m.IncarnationStarted(run=RUN, incarnation=1, step=1, parent=0))
    told = [said.group for said in room.said if isinstance(said, m.GroupReady)]
    assert (group.id in told) is announced
    assert {other.id for other in ahead} <= set(told)


def test_a_verdict_that_names_no_newest_version_takes_none_away(room: Room) -> None:
    key = room.key(room.any())
    room.tell(room.scored(key, oldest_version=0, newest_version=3))
    room.tell(room.scored(key, oldest_version=0))
    assert room.sql(f"select oldest_version, newest_version from attempts where attempt_id = '{key.attempt}'") == [
        (0, 3)
    ]


def test_what_workers_say_of_a_run_that_is_over_reads_nothing_of_its_record(engine: Engine) -> None:
    """They measure its versions, for hours: each heartbeat would read every problem and group of it."""

    class Counting(Store):
        loads = 0

        def load(self, run: str, now: float, before: WorkingSet | None = None) -> WorkingSet | None:
            self.loads += 1
            return super().load(run, now, before)

    room = Room(engine).begin()
    room.desk.store = store = Counting(engine)
    room.tell(m.RunCommand(run=RUN, action="stop"))
    for _ in range(3):  # ends, and is let go of
        room.now += KEEP_FINISHED_S
        room.tell()
    assert RUN not in room.desk.sets
    for _ in range(3):
        room.now += 1
        beat = m.AttemptHeartbeat(run=RUN, worker="w", attempts={"of-an-evaluation": (0, 0)})
        assert room.tell(beat, m.Alert(run=RUN, name="late", severity="info", what="late")) == []
    assert store.loads == 0
    room.tell(m.RunCommand(run=RUN, action="resume"))
    assert room.ws.head.state is RunState.running


@pytest.mark.parametrize("late", [False, True], ids=["publication first", "fork first"])
def test_what_a_fork_made_too_old_is_not_announced_whichever_topic_was_read_first(room: Room, late: bool) -> None:
    """Steps 2 and 3 are cut off. A token of step 3 is two steps back to the fork and one forward: three, over the bound."""
    one, two, three = (
        m.PolicyPublished(run=RUN, serial=serial, incarnation=0, step=serial, parent=serial - 1, manifest=REF)
        for serial in (1, 2, 3)
    )
    room.tell(one, m.StepCommitted(run=RUN, incarnation=0, step=1, serial=1, groups={}), two)
    if not late:
        room.tell(three)
    *ahead, group = list(room.ws.open.values())[:4]
    for other in ahead:
        room.tell(*[room.scored(room.key(a), oldest_version=1, newest_version=1) for a in other.attempts])
    *keys, last = [room.key(a) for a in group.attempts]
    room.tell(*[room.scored(key, oldest_version=2, newest_version=2) for key in keys])
    room.tell(room.scored(last, oldest_version=2, newest_version=3))
    room.tell(m.IncarnationStarted(run=RUN, incarnation=1, step=1, parent=0))
    told = {said.group for said in room.said if isinstance(said, m.GroupReady)}
    assert told == {other.id for other in ahead}


@pytest.mark.parametrize("complete", [True, False], ids=["a complete group", "a running group"])
def test_what_a_new_trainers_first_version_sampled_is_not_too_old_before_that_trainers_beginning_is_read(
    engine: Engine, complete: bool
) -> None:
    """Its version is of step 1, and the ledger still stands at step 4 of the trainer before it. Once the fork is read, nothing
    that the version sampled is old."""
    room = Room(engine, config(max_staleness=1)).begin()
    said: list[Any] = []
    for step in range(1, 5):
        groups = list(room.ws.open.values())[:3]
        room.tell(*[room.scored(room.key(a), oldest_version=step - 1) for g in groups for a in g.attempts])
        room.tell(
            m.PolicyPublished(run=RUN, serial=step, incarnation=0, step=step, parent=0, manifest=REF),
            m.PolicyApplied(run=RUN, replica="i", url="", serial=step),
            m.StepCommitted(run=RUN, incarnation=0, step=step, serial=step, groups={g.id: 0 for g in groups}),
        )
    room.tell(
        m.PolicyPublished(run=RUN, serial=5, incarnation=1, step=1, parent=-1, manifest=REF),
        m.PolicyApplied(run=RUN, replica="i", url="", serial=5),
    )
    group = next(iter(room.ws.open.values()))
    room.tell(m.AttemptHeartbeat(run=RUN, worker="w", attempts={a.id: (0, 5) for a in group.attempts}))
    said += room.said
    if complete:
        room.tell(*[room.scored(room.key(a), oldest_version=5) for a in group.attempts])
    said += room.said
    room.now += 1
    room.tell()
    said += room.said
    assert not [s for s in said if isinstance(s, m.Alert | m.AttemptCancel)]
    room.tell(m.IncarnationStarted(run=RUN, incarnation=1, step=1, parent=0))
    assert (group.id in {s.group for s in room.said if isinstance(s, m.GroupReady)}) is complete
    assert (group.id in room.ws.open) is not complete
    assert audit(engine, RUN, max_staleness=1).findings == []


def test_what_a_step_trained_that_the_ledger_has_lost_is_waited_for_no_longer(engine: Engine) -> None:
    """Of a ledger that was put back. Waited for, the groups of step 1 would keep their places, and the gate closed."""
    room = Room(engine, config(max_staleness=1)).begin()
    ready: list[str] = []
    while len(ready) < 6:
        group = next(iter(room.ws.open.values()))
        room.tell(*[room.scored(room.key(a)) for a in group.attempts])
        ready.append(group.id)
    problems = [room.ws.announced[name] for name in ready[:3]]
    room.tell(m.StepCommitted(run=RUN, incarnation=0, step=2, serial=2, groups=dict.fromkeys(ready[3:], 0)))
    assert not room.ws.waiting
    assert room.ws.accepted == 6
    assert not any(room.ws.catalogue.free_ones()[room.ws.catalogue.handle(problem)] for problem in problems)
    assert "ledger_behind" in {said.name for said in room.said if isinstance(said, m.Alert)}


def test_nothing_is_announced_before_a_trainer_was_heard_of(engine: Engine) -> None:
    room = Room(engine)
    room.tell(
        m.ProblemAdmitted(
            run=RUN, pack=REF, pack_hidden=REF, problems={f"p{i}": ("debugging", "cell") for i in range(40)}
        ),
        m.PolicyPublished(run=RUN, serial=0, incarnation=0, step=0, parent=-1, manifest=REF),
        m.PolicyApplied(run=RUN, replica="i", url="", serial=0),
        m.RunCommand(run=RUN, action="start", config=REF),
    )
    group = next(iter(room.ws.open.values()))
    room.tell(*[room.scored(room.key(a)) for a in group.attempts])
    assert not [said for said in room.said if isinstance(said, m.GroupReady)]
    room.tell(m.IncarnationStarted(run=RUN, incarnation=0, step=0, parent=-1))
    assert [(said.group, said.incarnation) for said in room.said if isinstance(said, m.GroupReady)] == [(group.id, 0)]


def test_a_group_says_what_each_step_earned_also_after_the_scheduler_began_anew(room: Room) -> None:
    group = next(iter(room.ws.open.values()))
    verdict = m.Verdict(solved=False, passed=1, total=2, steps=[0.25, 0.0])
    *keys, last = [room.key(a) for a in group.attempts]
    room.tell(*[room.scored(key, reward=0.5, verdict=verdict, terms={"solved": 0.5}) for key in keys])
    room.desk = Desk(Store(room.engine), lambda ref: room.run_config)
    room.tell(room.scored(last))
    (ready,) = [said for said in room.said if isinstance(said, m.GroupReady)]
    assert [member.steps for member in ready.members] == [*([[0.5, 0.0]] * len(keys)), msgspec.UNSET]
