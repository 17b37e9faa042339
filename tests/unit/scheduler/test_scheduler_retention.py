"""Routing that every checkpoint has trained, and old versions: what of them may go, and what is needed for those that stay."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, insert, select, update

from services.scheduler.garbage import needed, routing, versions
from services.scheduler.sweep import sweep, untrainable
from shared import objects as stores
from shared import weights
from shared.contracts.ids import checkpoint_prefix, open_evaluation, policy_prefix
from shared.contracts.lineage import Fork, Lineage
from shared.contracts.messages import EvalRequested
from shared.contracts.run import Ref
from shared.ledger.models import Attempt, Event, Group, Incarnation, Policy, Replica, Run, Step, Trained
from tests.contract.test_ledger import ATTEMPT, GROUP, T

REF = Ref(key="k", size=1, checksum="c" * 32)
RUN = {
    "run_id": "r", "state": "running", "config": REF, "code_version": "", "incarnation": 1, "created_at": 0.0, "spent_s": 0.0,
    "reason": "", "last_event": 0, "last_message": 0, "last_draw": 0, "last_ready": 0,
}  # fmt: skip


@pytest.fixture
def told(engine: Engine) -> Engine:
    """Incarnation 1 continued 0 from step 2. Group gN was trained by step N; g3 on the branch that died, too; g4 there alone."""
    steps = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 3), (1, 5)]
    facts = [("g1", 0, 1), ("g2", 0, 2), ("g3", 0, 3), ("g4", 0, 4), ("g3", 1, 3), ("g5", 1, 5)]
    packs = {"run_id": "r", "pack_hash": "h", "pack": REF, "pack_hidden": REF}
    problem = {"run_id": "r", "pack_hash": "h", "category": "", "cell": "", "admitted_at": 0}
    with engine.begin() as connection:
        connection.execute(insert(Run).values(RUN))
        connection.execute(insert(T["packs"]).values(packs))
        for incarnation, step, parent in ((0, 0, -1), (1, 2, 0)):
            values = {"incarnation": incarnation, "step": step, "parent": parent, "started_at": 0.0}
            connection.execute(insert(Incarnation).values({"run_id": "r"} | values))
        for serial, (incarnation, step) in enumerate(steps):
            values = {"incarnation": incarnation, "step": step, "serial": serial, "committed_at": 0.0, "metrics": {}}
            connection.execute(insert(Step).values({"run_id": "r"} | values))
        for name in ("g1", "g2", "g3", "g4", "g5", "dropped", "waits"):
            connection.execute(insert(T["problems"]).values(problem | {"problem_id": f"p-{name}"}))
            state = "dropped" if name == "dropped" else "ready"
            group = {
                "group_id": name,
                "problem_id": f"p-{name}",
                "state": state,
                "sequence": len(name) * 100 + ord(name[-1]),
            }
            connection.execute(insert(Group).values(GROUP | group))
            attempt = {"attempt_id": f"a-{name}", "group_id": name, "state": "scored", "trajectory": REF}
            connection.execute(insert(Attempt).values(ATTEMPT | attempt))
        for group, incarnation, step in facts:
            fact = {"group_id": group, "incarnation": incarnation, "step": step, "reported_age": 0}
            connection.execute(insert(Trained).values({"run_id": "r"} | fact))
    return engine


def checkpoint(incarnation: int, step: int) -> str:
    return f"{checkpoint_prefix('r', incarnation, step)}/manifest.json"


@pytest.mark.parametrize(
    ("checkpoints", "gone"),
    [
        ([], []),
        ([checkpoint(1, 3), checkpoint(1, 5)], ["g1", "g2", "g3"]),
        ([checkpoint(1, 5)], ["g1", "g2", "g3", "g5"]),
        ([checkpoint(0, 4), checkpoint(1, 5)], ["g1", "g2"]),  # a branch that died shares two steps with what survives
        ([checkpoint(0, 1), checkpoint(1, 5)], ["g1"]),
        ([checkpoint(1, 5).replace("manifest", "state")], []),  # half a checkpoint is none
    ],
)
def test_routing_goes_once_every_checkpoint_has_trained_it(
    told: Engine, checkpoints: list[str], gone: list[str]
) -> None:
    with told.begin() as connection:
        everybody = connection.execute(select(Attempt.attempt_id)).scalars().all()
        found = untrainable(connection, "r", everybody, checkpoints)
    assert sorted(found) == sorted(f"a-{name}" for name in [*gone, "dropped"])


def test_of_an_attempt_that_was_trained_the_routing_goes_and_nothing_else(told: Engine, tmp_path: Path) -> None:
    objects = stores.connect(f"file:{tmp_path / 'objects'}")
    stay = ["runs/r/attempts/a-g1/0/trajectory-1.zst", "runs/r/attempts/a-waits/0/routing-1.zst", checkpoint(1, 5)]
    for key in [*stay, "runs/r/attempts/a-g1/0/routing-1.zst"]:
        objects.put(key, b"x")
    with told.begin() as connection:
        connection.execute(update(Attempt).values(trajectory=Ref(key=stay[0], size=1, checksum="c" * 32)))
    assert list(sweep(told, objects, "r", patience_s=60.0, delete=True)) == []
    found = sweep(told, objects, "r", patience_s=60.0, delete=True, trained=True)
    assert [one.key for one in found] == ["runs/r/attempts/a-g1/0/routing-1.zst"]
    assert sorted(objects.list("runs/r/")) == sorted(stay)


def test_what_is_no_routing_of_these_attempts_is_never_named() -> None:
    keys = [
        "runs/r/attempts/a/0/trajectory-1",
        "runs/r/attempts/b/0/routing-1",
        "runs/x/attempts/a/0/routing-1",
        "routing-1",
    ]
    assert list(routing("r", keys, {"a": "trained"})) == []


@given(st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 9), st.integers(-1, 4)), max_size=6), st.data())
def test_the_shared_past_of_a_place_is_part_of_what_survives(
    forks: dict[int, tuple[int, int]], data: st.DataObject
) -> None:
    lineage = Lineage({i: Fork(min(parent, i - 1), step) for i, (step, parent) in forks.items()})
    incarnation, step = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 12))
    shared = lineage.shared(incarnation, step)
    assert 0 <= shared <= step
    assert shared == step or not lineage.survives(incarnation, step)


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.sets(st.integers(0, 40)))
def test_every_version_that_stays_can_be_built(bases: list[bool], kept: set[int]) -> None:
    parents = {serial: -1 if base or serial == 0 else serial - 1 for serial, base in enumerate(bases)}
    keys = {f"{policy_prefix('r', serial)}/0000-0000.bin": serial for serial in range(len(bases) + 5)}
    gone = {keys[one.key] for one in versions("r", keys, parents, kept)}
    assert gone <= set(parents)  # what the ledger has not heard of stays
    for serial in kept & set(parents):
        while serial >= 0:
            assert serial not in gone
            serial = parents[serial]
    assert needed(parents, parents) == set(parents)


def test_what_is_served_promoted_or_evaluated_and_the_newest_are_rebuilt_after_the_others_went(
    told: Engine, tmp_path: Path
) -> None:
    objects = stores.connect(f"file:{tmp_path / 'objects'}")
    generator = np.random.default_rng(1)
    published: list[weights.Version] = []
    now = time.time()
    for serial in range(9):
        tensors = {"w": generator.integers(0, 9, 64).astype(np.float32)}
        parent = None if serial % 3 == 0 else published[-1]
        ref = weights.publish(objects, "r", serial, 0, serial, parent, tensors)
        published.append(weights.Version(serial, ref, tensors))
    with told.begin() as connection:
        for one in published:
            row = {"run_id": "r", "serial": one.serial, "incarnation": 0, "step": one.serial, "published_at": now}
            parent = -1 if one.serial % 3 == 0 else one.serial - 1
            connection.execute(insert(Policy).values(row | {"parent": parent, "manifest": one.manifest}))
        replica = {"run_id": "r", "pool": "rollout", "serial": 4, "ok": True, "url": "", "pause_s": 0.0, "reason": ""}
        connection.execute(insert(Replica).values(replica | {"replica": "i", "applied_at": now}))
        gone = {"replica": "gone", "serial": 2, "ok": False, "applied_at": 0.0}
        connection.execute(insert(Replica).values(replica | gone))
        once = {
            "run_id": "r",
            "sequence": 1,
            "at": 0.0,
            "kind": "policy.promoted",
            "subject": "5",
            "epoch": 0,
            "data": {},
        }
        connection.execute(insert(Event).values(once))
        asked = EvalRequested(run="r", eval="e", serial=1, pack=REF, pack_hidden=REF)
        objects.put(open_evaluation("r", "e"), msgspec.json.encode(asked))
        objects.put(open_evaluation("r", "cut-short"), b"")
    for _ in sweep(told, objects, "r", patience_s=60.0, delete=True, last=1):
        pass
    for one in published:
        if one.serial in (0, 1, 3, 4, 5, 6, 7, 8):
            assert weights.rebuild(objects, one.manifest)["w"].tobytes() == one.tensors["w"].tobytes()
        else:
            with pytest.raises(weights.WeightsError):
                weights.rebuild(objects, one.manifest)
        assert weights.read_manifest(objects, one.manifest).serial == one.serial
