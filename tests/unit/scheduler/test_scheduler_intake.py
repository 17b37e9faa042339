"""Single messages: what is believed, what is refused, what comes too late."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, text

from services.scheduler.audit import counts
from services.scheduler.desk import KEEP_FINISHED_S, Desk
from services.scheduler.records import Attempt
from services.scheduler.requesting import GROUPS_AHEAD
from services.scheduler.store import Store
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import Purpose, RunConfig, Sampling
from shared.ledger.transitions import AttemptState, RunState
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
            m.RunControl(run=RUN, action="start", config=REF),
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
        m.RunControl(run=RUN, action="start", config=REF),
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


def test_an_older_epoch_changes_nothing_and_is_accounted_for(room: Room) -> None:
    attempt = room.any()
    key = room.key(attempt)
    room.tell(m.RolloutFailed(run=RUN, key=key, reason="the sandbox died", worker="w"))
    room.now += 5
    room.tell()
    assert (attempt.epoch, attempt.state) == (1, AttemptState.requested)
    assert [(r.key.attempt, r.key.epoch) for r in room.said if isinstance(r, m.RolloutRequested)] == [(attempt.id, 1)]
    room.tell(room.scored(key))
    assert (attempt.epoch, attempt.state) == (1, AttemptState.requested)
    assert counts(room.engine, RUN)["rollouts.scored"] == 1


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
    again = m.RunControl(run=RUN, action="reconfigure", config=m.Ref(key="n", size=1, checksum="e" * 32))
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
    room.run_config = msgspec.structs.replace(old, **changed)
    room.tell(m.RunControl(run=RUN, action=action, config=m.Ref(key="n", size=1, checksum="e" * 32)))
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
    pause, resume = (m.RunControl(run=RUN, action=a) for a in ("pause", "resume"))
    room.tell(pause, offset=50)
    room.tell(resume, offset=51)
    assert room.ws.head.state == "running"
    room.tell(pause, offset=50)
    assert room.ws.head.state == "running"
    room.tell(pause, offset=52)
    assert room.ws.head.state == "paused"


def test_every_word_is_answered_with_the_state_that_the_run_is_in_and_a_growing_number(room: Room) -> None:
    def answer(action: str, **more: Any) -> list[tuple[str, str, bool]]:
        room.tell(m.RunControl(run=RUN, action=action, by="alice", **more))  # type: ignore[arg-type]
        mine = [said for said in room.said if isinstance(said, m.RunControl)]
        numbers.extend(said.number for said in mine)
        room.tell(*mine)  # our own words come back
        return [(said.action, said.by, said.drain) for said in mine]

    numbers: list[int] = []
    assert answer("resume") == [("resume", "alice", True)]  # it runs already
    assert answer("pause", drain=False) == [("pause", "alice", False)]
    assert answer("pause") == [("pause", "alice", True)]
    assert answer("start", config=REF) == [("pause", "scheduler", True)]  # it has begun
    assert answer("stop") == [
        ("stop", "alice", True),
        ("finished", "scheduler", True),
    ]  # the trainer has nothing in hand
    assert answer("pause") == [("finished", "alice", True)]  # a run that is over is paused by nobody
    assert numbers == sorted(set(numbers))
    assert all(numbers)


def test_going_back_to_a_version_is_recorded_with_who_said_so_and_changes_nothing_by_itself(room: Room) -> None:
    word = m.RunControl(run=RUN, action="rollback", serial=3, id="x", by="alice", reason="it collapsed")
    assert room.tell(word) == []
    assert room.ws.head.state == "running"
    ((subject, data),) = room.sql("select subject, data from events where kind = 'run.rollback'")
    assert subject == "3"
    assert "alice" in str(data)


def alert(name: str, run: str = RUN) -> m.Alert:
    return m.Alert(run=run, name=name, severity="warning", what="it solves nothing any more")


def test_an_alert_that_the_configuration_names_pauses_the_run_once_and_says_why(engine: Engine) -> None:
    room = Room(engine, config(pause_on=["fewer_solved"])).begin()
    room.tell(alert("longer_attempts"), alert("fewer_solved", run="r-unknown"))
    assert room.ws.head.state == "running"
    assert room.tell(alert("fewer_solved"), offset=70) == []
    assert room.ws.head.state == "paused"
    (pause,) = [said for said in room.said if isinstance(said, m.RunControl)]
    assert (pause.action, pause.drain, pause.by) == ("pause", False, "scheduler")
    assert "it solves nothing any more" in pause.reason
    room.tell(pause)  # our own word comes back
    room.tell(m.RunControl(run=RUN, action="resume", by="alice"))
    room.tell(pause)  # late
    room.tell(alert("fewer_solved"), offset=70)  # delivered again
    assert room.ws.head.state == "running"
    room.tell(alert("fewer_solved"), offset=71)  # said again
    assert room.ws.head.state == "paused"


def test_without_being_named_an_alert_pauses_nothing(room: Room) -> None:
    assert room.tell(alert("fewer_solved"), alert("gradient_not_finite")) == []
    assert room.ws.head.state == "running"


def test_above_its_quota_a_run_pauses_without_naming_the_alert_and_goes_on_with_another_quota(room: Room) -> None:
    room.tell(alert("quota_exceeded"))
    assert room.ws.head.state == "paused"
    (pause,) = [said for said in room.said if isinstance(said, m.RunControl)]
    assert (pause.action, pause.drain, pause.by) == ("pause", False, "scheduler")
    room.run_config = config(quota_gb=-1.0)
    room.tell(m.RunControl(run=RUN, action="reconfigure", config=REF))
    assert room.ws.config.schedule.quota_gb == 0.0
    (objection,) = [said for said in room.said if isinstance(said, m.Alert)]
    assert objection.examples == ["schedule.quota_gb: found -1.0; allowed: 0 (no quota) or more"]
    room.run_config = config(quota_gb=20.0)
    room.tell(m.RunControl(run=RUN, action="reconfigure", config=REF))
    assert (room.ws.head.state, room.ws.config.schedule.quota_gb) == ("paused", 20.0)
    answer = [said for said in room.said if isinstance(said, m.RunControl)][-1]
    assert (answer.action, answer.drain, answer.config) == ("pause", False, REF)  # the trainer still holds
    room.tell(m.RunControl(run=RUN, action="resume", by="alice"))
    assert room.ws.head.state == "running"


def test_an_impossible_configuration_ends_the_run_with_the_reason(engine: Engine) -> None:
    room = Room(engine, config(group_min=9))
    room.tell(m.RunControl(run=RUN, action="start", config=REF))
    assert "schedule.group_min: found 9" in room.sql("select reason from runs")[0][0]
    assert [said.action for said in room.said if isinstance(said, m.RunControl)] == ["finished"]


@pytest.mark.parametrize("error", [ObjectMissing("runs/r-test/config.json"), ValueError("key '../x': no key")])
def test_a_configuration_that_cannot_be_read_ends_the_run_with_the_reason(engine: Engine, error: Exception) -> None:
    room = Room(engine)

    def missing(_: Any) -> RunConfig:
        raise error

    room.desk = Desk(Store(engine), missing)
    room.tell(m.RunControl(run=RUN, action="start", config=REF))
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
    assert found.head == old.head
    assert {a.id: (a.epoch, a.state, a.worker) for a in found.attempts.values()} == {
        a.id: (a.epoch, a.state, a.worker) for a in old.attempts.values()
    }
    assert list(found.waiting) == list(old.waiting)
    assert found.catalogue.free == old.catalogue.free
    assert found.oldest() == old.oldest()
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

        def load(self, run: str, now: float) -> WorkingSet | None:
            self.loads += 1
            return super().load(run, now)

    room = Room(engine).begin()
    room.desk.store = store = Counting(engine)
    room.tell(m.RunControl(run=RUN, action="stop"))
    for _ in range(3):  # ends, and is let go of
        room.now += KEEP_FINISHED_S
        room.tell()
    assert RUN not in room.desk.sets
    for _ in range(3):
        room.now += 1
        beat = m.AttemptHeartbeat(run=RUN, worker="w", attempts={"of-an-evaluation": (0, 0)})
        assert room.tell(beat, m.Alert(run=RUN, name="late", severity="info", what="late")) == []
    assert store.loads == 0
    room.tell(m.RunControl(run=RUN, action="resume"))
    assert room.ws.head.state is RunState.running
