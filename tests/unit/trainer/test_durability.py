"""Crashes, forks and zombies: the surviving lineage trains every group once and gives the same weights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from synthetic import RUN, SHAPE, group, run_config

from etude.demo.prepare import PAUSE_ON
from services.trainer import checkpoints, groups, masters
from services.trainer.checkpoints import Superseded
from services.trainer.config import TrainerSettings
from services.trainer.ranks import Options
from services.trainer.service import Service
from services.trainer.training import Advance, TrainingRun
from shared import weights
from shared.bus import BusUnavailable
from shared.contracts import codec
from shared.contracts.messages import (
    Alert,
    GroupQuarantined,
    GroupReady,
    IncarnationStarted,
    PolicyPublished,
    StepCommitted,
)
from shared.contracts.run import Credit, RunConfig, Sampling, TrainConfig
from shared.contracts.topics import GROUPS_QUARANTINED
from shared.model import load_checkpoint
from shared.objects import Objects, ObjectsUnavailable
from shared.telemetry import Health

Open = Callable[[], TrainingRun]


@pytest.fixture
def config(objects: Objects, tmp_path: Path) -> RunConfig:
    return run_config(objects, tmp_path / "base")


@pytest.fixture
def opened(objects: Objects, config: RunConfig, tmp_path: Path) -> Open:
    """Opens the run as a fresh process would."""
    return lambda: TrainingRun(objects, config, trainer="t", cache=tmp_path / "cache", options=Options(mtp_stride=1))


def fetch(objects: Objects, number: int, **options: object) -> groups.LoadedGroup:
    return groups.load(objects, group(objects, number, **options), SHAPE, TrainConfig())


def step(training: TrainingRun, number: int, version: int = 0) -> Advance:
    """The `number`-th step: groups 2 number and 2 number + 1."""
    batch = [fetch(training.objects, 2 * number + i, version=version) for i in (0, 1)]
    result = training.advance(batch)
    if training.checkpoint_due:
        training.checkpoint()
    return result


def digest(training: TrainingRun) -> str:
    return weights.checksum(masters.published_bits(training.engine.model))


def full_state(training: TrainingRun) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in training.engine.state().items()}


def test_a_run_begins_with_the_base_policy_as_serial_zero(objects: Objects, opened: Open) -> None:
    training = opened()
    begun, published = (message for _, message in training.opening)
    assert begun == IncarnationStarted(run=RUN, incarnation=0, step=0, parent=-1)
    assert isinstance(published, PolicyPublished)
    assert (published.serial, published.incarnation, published.step, published.parent) == (0, 0, 0, -1)
    assert weights.checksum(weights.rebuild(objects, published.manifest)) == digest(training)


def test_every_step_publishes_what_its_masters_round_to(objects: Objects, opened: Open) -> None:
    training = opened()
    seen = {digest(training)}
    parents = []
    for number in range(4):
        result = step(training, number)
        assert result.published is not None
        assert weights.checksum(weights.rebuild(objects, result.published.manifest)) == digest(training)
        seen.add(digest(training))
        parents.append(result.published.parent)
    assert len(seen) == 5
    assert parents == [0, 1, -1, 3]  # a full base every 3 versions


def test_a_commit_names_its_groups_their_ages_and_figures(opened: Open) -> None:
    training = opened()
    step(training, 0)
    committed = step(training, 1, version=0).committed
    assert isinstance(committed, StepCommitted)
    assert (committed.step, committed.serial, committed.groups) == (2, 2, {"g-2": 1, "g-3": 1})
    assert committed.metrics["solved_share"] == 0.25
    assert committed.metrics["solved_gain"] == pytest.approx(0.15)
    assert committed.metrics["reward_mean"] == pytest.approx(0.3)
    assert committed.metrics["replay_replaced_share"] == 0.0
    assert {
        "entropy",
        "grad_norm",
        "mismatch_k3",
        "mtp_loss",
        "seconds_publish",
        "tokens_fed",
    } <= committed.metrics.keys()


def test_lengths_are_of_attempts_however_many_contexts_one_has(opened: Open) -> None:
    training = opened()
    once = [fetch(training.objects, number) for number in (0, 1)]
    sampled = [int(s.sampled_T.sum()) for loaded in once for s in loaded.sequences]
    lengths = [len(s.tokens_T) for loaded in once for s in loaded.sequences]
    attempts = sum(len(loaded.rewards) for loaded in once)
    committed = training.advance([replace(loaded, sequences=loaded.sequences * 2) for loaded in once]).committed
    assert isinstance(committed, StepCommitted)
    assert committed.metrics["sampled_mean"] == pytest.approx(2 * sum(sampled) / attempts)
    assert committed.metrics["length_mean"] == pytest.approx(2 * sum(lengths) / attempts)


def test_resuming_gives_the_same_weights_bit_for_bit(objects: Objects, opened: Open) -> None:
    """Killed after step 3 (its checkpoint is of step 2); the same groups come again."""
    straight = opened()
    for number in range(3):
        step(straight, number)
    after_three = digest(straight), full_state(straight)
    # The killed process is simply never used again.
    resumed = opened()
    assert (resumed.step, resumed.mine.incarnation, resumed.mine.parent) == (2, 1, 0)
    assert resumed.trained == {"g-0", "g-1", "g-2", "g-3"}
    result = step(resumed, 2)
    assert (digest(resumed), full_state(resumed)) == after_three
    assert result.published is not None
    assert result.published.serial == 5  # 0..3 by the first, 4 its own base: never reused


def test_a_restart_says_again_what_may_not_have_been_said(opened: Open) -> None:
    first = opened()
    committed = [step(first, number).committed for number in range(2)][-1]
    resumed = opened()
    again, begun, published = (message for _, message in resumed.opening)
    assert again == committed  # the checkpoint contains it, the crash may have come before the message
    assert begun == IncarnationStarted(run=RUN, incarnation=1, step=2, parent=0)
    assert isinstance(published, PolicyPublished)
    assert (published.serial, published.parent, published.step) == (3, -1, 2)
    assert digest(resumed) == digest(first)


def test_dying_before_any_checkpoint_starts_again_from_the_base(opened: Open) -> None:
    first = opened()
    base = digest(first)
    step(first, 0)
    second = opened()
    third = opened()
    assert digest(third) == base
    assert (third.mine.incarnation, third.mine.parent, third.step) == (2, 1, 0)
    kinds = [type(message) for _, message in second.opening]
    assert kinds == [PolicyPublished, IncarnationStarted, PolicyPublished]  # serial 0 may never have been announced
    assert third.serial == 3


def test_a_zombie_notices_before_it_publishes(objects: Objects, opened: Open) -> None:
    zombie = opened()
    step(zombie, 0)
    heir = opened()
    keys = set(objects.list(f"runs/{RUN}/policies/"))
    before = digest(heir)
    with pytest.raises(Superseded):
        step(zombie, 1)
    with pytest.raises(Superseded):
        zombie.checkpoint()
    assert set(objects.list(f"runs/{RUN}/policies/")) == keys
    assert not list(checkpoints.manifests(objects, RUN))
    assert digest(heir) == before
    assert step(heir, 1).published is not None


def test_a_zombie_that_already_looked_loses_the_race_for_the_serial(
    objects: Objects, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes the fence just before the heir claims: the conditional put of the manifest decides."""
    zombie = opened()
    heir = opened()  # its base took serial 1
    monkeypatch.setattr(checkpoints, "check_not_superseded", lambda *_: None)
    with pytest.raises(Superseded):
        step(zombie, 0)
    assert weights.read_manifest(objects, objects.head(f"runs/{RUN}/policies/00000001/manifest.json")).incarnation == 1
    assert heir.serial == 1


class Shaky:
    """A store with outages, before or after it has done what was asked: its 1st, 4th, 9th, 16th, … call fails."""

    def __init__(self, store: Objects, *, after: bool) -> None:
        self._store, self._after, self._calls = store, after, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self._calls += 1
            if math.isqrt(self._calls) ** 2 != self._calls:
                return method(*arguments)
            if self._after and name != "put_file":
                method(*arguments)
            raise ObjectsUnavailable("no answer")

        return call


@pytest.mark.parametrize("after", [False, True])
def test_a_store_that_fails_now_and_then_costs_no_step_and_no_serial(
    objects: Objects, opened: Open, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setattr("services.trainer.persistence.FIRST_DELAY_S", 0.001)
    training = opened()
    batch = [fetch(objects, i) for i in (0, 1)]
    training.objects = Shaky(objects, after=after)  # type: ignore[assignment]
    result = training.advance(batch)
    assert result.published is not None
    assert result.published.serial == 1
    ref = objects.head(f"runs/{RUN}/policies/00000001/manifest.json")
    assert weights.checksum(weights.rebuild(objects, ref)) == digest(training)
    training.checkpoint()
    assert [m.step for m in checkpoints.manifests(objects, RUN)] == [1]


def test_a_bus_that_is_away_is_waited_for(objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        tries = 0

        async def publish_many(self, items: list[object]) -> None:
            self.tries += 1
            if self.tries < 3:
                raise BusUnavailable("no answer")

    monkeypatch.setattr("services.trainer.announcing.FIRST_DELAY_S", 0.001)
    bus, settings = Away(), TrainerSettings(state=tmp_path)
    health, message = Health("trainer", settings), GroupQuarantined(run=RUN, group="g", reason="r")

    async def scenario() -> None:
        stop = asyncio.Event()
        service = Service(settings, bus, objects, health, stop)  # type: ignore[arg-type]
        await service._announce([(GROUPS_QUARANTINED, message)])
        assert bus.tries == 3
        assert health.ready
        bus.tries = 0
        stop.set()
        with pytest.raises(BusUnavailable):
            await service._announce([(GROUPS_QUARANTINED, message)])

    asyncio.run(scenario())


def test_two_trainers_never_hold_the_same_incarnation(objects: Objects) -> None:
    nothing = checkpoints.Resume(None, None, frozenset())
    claimed = [checkpoints.claim(objects, RUN, f"t{i}", nothing) for i in range(5)]
    assert [c.incarnation for c in claimed] == [0, 1, 2, 3, 4]
    with pytest.raises(Superseded):
        checkpoints.check_not_superseded(objects, claimed[3], RUN)
    checkpoints.check_not_superseded(objects, claimed[4], RUN)


def test_a_damaged_checkpoint_is_passed_over(objects: Objects, opened: Open) -> None:
    first = opened()
    for number in range(4):
        step(first, number)
    newest, _ = checkpoints.manifests(objects, RUN)
    assert newest.step == 4
    objects.put(newest.state.key, b"not a state")
    assert opened().step == 2


@pytest.mark.parametrize("format", ["etude-step-1", "etude-step-9"])
def test_a_run_whose_checkpoints_are_all_unusable_does_not_begin_again_by_itself(
    objects: Objects, opened: Open, format: str
) -> None:
    first = opened()
    for number in range(4):
        step(first, number)
    found = list(checkpoints.manifests(objects, RUN))
    keys = [key for _, _, key in checkpoints.found(objects, RUN)]
    for key, manifest in zip(keys, found, strict=True):
        bad = msgspec.structs.replace(manifest, format=format)
        objects.put(key, b"no manifest" if format == checkpoints.FORMAT else msgspec.json.encode(bad))
    before = checkpoints.read_incarnations(objects, RUN)
    with pytest.raises(checkpoints.NoneUsable, match=f"etude rollback {RUN} --to") as raised:
        opened()
    assert all(key in str(raised.value) for key in keys)
    assert checkpoints.read_incarnations(objects, RUN) == before
    for key, manifest in zip(keys, found, strict=True):
        objects.put(key, msgspec.json.encode(manifest))
    assert opened().step == 4


def test_what_a_living_trainer_made_durable_while_its_heir_was_opening_is_not_left_out(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = opened()
    for number in range(2):
        step(living, number)

    def slowly(*arguments: Any, **options: Any) -> Any:  # the heir has found step 2 and is about to load its base
        for number in (2, 3):
            step(living, number)
        return load_checkpoint(*arguments, **options)

    monkeypatch.setattr("services.trainer.ranks.load_checkpoint", slowly)
    heir = opened()
    assert (heir.step, heir.trained) == (4, living.trained)
    assert full_state(heir) == full_state(living)
    with pytest.raises(Superseded):
        step(living, 4)


def test_old_checkpoints_are_deleted(objects: Objects, opened: Open) -> None:
    training = opened()
    for number in range(6):
        step(training, number)
    assert [m.step for m in checkpoints.manifests(objects, RUN)] == [6, 4]
    assert len(list(objects.list(f"runs/{RUN}/checkpoints/"))) == 6


def test_samples_of_dead_steps_are_aged_along_the_fork_and_what_is_too_old_is_never_trained(opened: Open) -> None:
    first = opened()
    for number in range(3):
        step(first, number)
    resumed = opened()  # from step 2; serial 3 was step 3 of the dead branch
    loaded = fetch(resumed.objects, 100, version=3)
    assert resumed.age(loaded) == (2 - 2) + (3 - 2)
    old = fetch(resumed.objects, 101, version=0)
    result = resumed.advance([loaded, old])
    assert result.committed is not None
    assert result.committed.groups == {"g-100": 1, "g-101": 2}
    assert not result.others
    schedule = msgspec.structs.replace(resumed.config.schedule, max_staleness=2)
    resumed.config = msgspec.structs.replace(resumed.config, schedule=schedule)
    late = resumed.advance([fetch(resumed.objects, 102, version=0), fetch(resumed.objects, 103, version=4)])
    assert late.committed is not None
    assert late.committed.groups == {"g-103": 1}
    aside, alert = (message for _, message in late.others)
    assert isinstance(aside, GroupQuarantined)
    assert aside.reason == "3 steps old; allowed: 2 (schedule.max_staleness)"
    assert isinstance(alert, Alert)
    assert alert.name == "age_bound_breached"
    assert alert.name in PAUSE_ON


def test_a_gradient_that_is_not_finite_sets_its_groups_aside_and_is_an_alert_at_which_new_runs_pause(
    opened: Open,
) -> None:
    training = opened()
    before = full_state(training)
    loaded = fetch(training.objects, 0)
    huge = [replace(s, advantages_T=np.full_like(s.advantages_T, 3e38)) for s in loaded.sequences]
    result = training.advance([replace(loaded, sequences=huge)])
    assert result.committed is None
    assert full_state(training) == before  # the speculation head neither
    aside, alert = (message for _, message in result.others)
    assert isinstance(aside, GroupQuarantined)
    assert aside.group == loaded.ready.group
    assert isinstance(alert, Alert)
    assert alert.name in PAUSE_ON


def test_a_speculation_head_whose_gradient_is_not_finite_stays_as_it_was_and_is_an_alert(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened()
    before = full_state(training)
    monkeypatch.setattr("services.trainer.loss.follow_loss", lambda student, *_: (student * 3e38).sum() * 1e10)
    result = training.advance([fetch(training.objects, 0)])
    assert result.committed is not None
    (alert,) = (message for _, message in result.others)
    assert isinstance(alert, Alert)
    assert (alert.name, alert.severity) == ("mtp_gradient_not_finite", "warning")
    moved = {name for name, value in full_state(training).items() if value != before[name]}
    assert not [name for name in moved if name.startswith("mtp/")]
    assert [name for name in moved if name.startswith("trunk/")]


def test_a_reason_of_any_length_fits_the_bus(opened: Open) -> None:
    topic, word = opened().set_aside("g", "why " * 50_000)
    codec.encode(topic, word)


def test_tokens_from_the_future_are_quarantined_by_the_trainer_that_lives(opened: Open) -> None:
    opened()
    training = opened()
    result = training.advance([fetch(training.objects, 0), fetch(training.objects, 1, version=7)])
    assert result.committed is not None
    assert list(result.committed.groups) == ["g-0"]
    (message,) = (m for _, m in result.others)
    assert isinstance(message, GroupQuarantined)
    assert (message.group, message.incarnation, "7" in message.reason) == ("g-1", 1, True)
    assert training.knows("g-1")


def damage(objects: Objects, ready: GroupReady, kind: str) -> GroupReady:
    member = ready.members[1]
    if kind == "missing":
        objects.delete(member.trajectory.key)
    elif kind == "flipped":
        data = bytearray(objects.get(member.trajectory))
        data[len(data) // 2] ^= 1
        objects.put(member.trajectory.key, bytes(data))
    elif kind == "not a trajectory":
        ref = objects.put(member.trajectory.key, b"something else")
        members = [*ready.members]
        members[1] = msgspec.structs.replace(member, trajectory=ref)
        return msgspec.structs.replace(ready, members=members)
    elif kind == "routing":
        routing = next(k for k in objects.list(member.trajectory.key.rsplit("/", 1)[0]) if k.endswith("routing"))
        objects.delete(routing)
    elif kind == "reward":
        return msgspec.structs.replace(ready, members=[msgspec.structs.replace(member, reward=float("nan"))] * 2)
    elif kind == "alone":
        return msgspec.structs.replace(ready, members=ready.members[:1])
    return ready


@pytest.mark.parametrize("kind", ["missing", "flipped", "not a trajectory", "routing", "reward", "alone"])
def test_a_damaged_group_is_refused_with_its_reason(objects: Objects, kind: str) -> None:
    ready = damage(objects, group(objects, 3), kind)
    with pytest.raises(groups.Untrainable) as caught:
        groups.load(objects, ready, SHAPE, TrainConfig())
    assert len(str(caught.value)) > 10


@pytest.mark.parametrize("field", ["attempt", "epoch", "group", "problem"])
def test_a_trajectory_of_another_attempt_is_never_trained_with_this_ones_reward(objects: Objects, field: str) -> None:
    """Its checksum is right: only its own key tells."""
    ready = group(objects, 3)
    about_member = {"attempt": {"trajectory": ready.members[2].trajectory}, "epoch": {"epoch": 5}}.get(field, {})
    about_group = {"group": {"group": "g-9"}, "problem": {"problem": "p-9"}}.get(field, {})
    members = [*ready.members]
    members[1] = msgspec.structs.replace(members[1], **about_member)
    ready = msgspec.structs.replace(ready, members=members, **about_group)
    with pytest.raises(groups.Untrainable, match=rf"trajectory of another attempt: key.{field}: found .*, allowed: "):
        groups.load(objects, ready, SHAPE, TrainConfig())


def test_groups_that_the_lot_leaves_out_do_not_count_in_the_loss(objects: Objects, opened: Open) -> None:
    failed = (0.0, 0.0, -0.2, 0.0)
    train = TrainConfig(credit=Credit(per="turn", failed_share=0.0))
    out = groups.load(objects, group(objects, 0, rewards=failed), SHAPE, train)
    assert out.left_out
    drawn = msgspec.structs.replace(train, credit=Credit(per="turn", failed_share=1.0))
    assert not groups.load(objects, group(objects, 0, rewards=failed), SHAPE, drawn).left_out
    assert not groups.load(objects, group(objects, 0, rewards=failed), SHAPE, TrainConfig()).left_out
    assert not groups.load(objects, group(objects, 1), SHAPE, train).left_out
    one = groups.load(objects, group(objects, 1), SHAPE, train)
    alone, together = opened().advance([one]), opened().advance([out, one])
    assert alone.committed is not None
    assert together.committed is not None
    assert together.committed.metrics["loss"] == alone.committed.metrics["loss"]
    assert together.committed.metrics["attempts"] == 2 * alone.committed.metrics["attempts"]


def test_the_normaliser_follows_the_longest_attempt_unless_it_is_set(objects: Objects, tmp_path: Path) -> None:
    def loss(norm_tokens: float) -> float:
        train = TrainConfig(learning_rate=0.0, norm_tokens=norm_tokens)
        config = run_config(objects, tmp_path / "base", train)
        training = TrainingRun(
            objects, config, trainer="t", cache=tmp_path / f"cache-{norm_tokens}", options=Options(mtp_stride=1)
        )
        result = training.advance([fetch(objects, 0)])
        assert result.committed is not None
        return result.committed.metrics["loss"]

    longest = Sampling().max_completion_tokens
    assert loss(0.0) == loss(float(longest)) == pytest.approx(loss(2.0 * longest) * 2)


def test_masters_of_a_checkpoint_round_to_the_version_it_published(objects: Objects, opened: Open) -> None:
    training = opened()
    for number in range(2):
        step(training, number)
    manifest = next(checkpoints.manifests(objects, RUN))
    state = checkpoints.load_state(objects, manifest, training.cache)
    bits = masters.published_bits(masters.model_from_state(SHAPE, state))
    published = weights.read_manifest(objects, objects.head(f"runs/{RUN}/policies/{manifest.serial:08d}/manifest.json"))
    assert weights.checksum(bits) == published.checksum


def test_a_problem_that_was_trained_is_set_aside_when_another_group_of_it_comes(opened: Open) -> None:
    """A ledger that lost its last commits may draw a problem once more."""
    training = opened()
    first, again = fetch(training.objects, 0), fetch(training.objects, 1)
    again = replace(again, ready=msgspec.structs.replace(again.ready, problem=first.ready.problem))
    result = training.advance([first, again])
    assert result.committed is not None
    assert set(result.committed.groups) == {first.ready.group}
    (word,) = [said for _, said in result.others if isinstance(said, GroupQuarantined)]
    assert (word.group, word.reason) == (again.ready.group, f"its problem is trained by {first.ready.group}")
