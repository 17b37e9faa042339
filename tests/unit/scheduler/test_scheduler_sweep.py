"""What may be deleted of a run's objects, and above all what may not."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, insert

from services.scheduler.garbage import Known, left_behind
from services.scheduler.sweep import sweep
from shared import objects as stores
from shared.contracts.run import Ref
from shared.ledger.models import Attempt, Group, Run

ATTEMPTS = {
    "a-done": Known(epoch=1, over=True, kept=1),
    "a-late": Known(epoch=2, over=True, kept=1),  # a verdict of an epoch before the last
    "a-running": Known(epoch=1, over=False, kept=None),
    "a-lost": Known(epoch=2, over=True, kept=None),
}


def gone(*keys: str) -> list[str]:
    return [one.key for one in left_behind("r", keys, ATTEMPTS)]


def test_epochs_that_were_given_up_may_go_and_the_one_that_counts_stays() -> None:
    assert gone("runs/r/attempts/a-done/0/t", "runs/r/attempts/a-done/1/t") == ["runs/r/attempts/a-done/0/t"]
    assert gone("runs/r/attempts/a-late/1/t") == []
    assert gone("runs/r/attempts/a-late/2/t") == ["runs/r/attempts/a-late/2/t"]
    assert gone(*(f"runs/r/attempts/a-lost/{epoch}/t" for epoch in range(3))) == [
        f"runs/r/attempts/a-lost/{epoch}/t" for epoch in range(3)
    ]


def test_what_runs_keeps_its_newest_epoch_and_every_later_one() -> None:
    assert gone(*(f"runs/r/attempts/a-running/{epoch}/t" for epoch in range(4))) == ["runs/r/attempts/a-running/0/t"]


@given(st.lists(st.text("runsattempolicch/-0123456789.", max_size=40)))
def test_nothing_but_objects_of_known_attempts_is_ever_named(keys: list[str]) -> None:
    others = [
        "runs/r/policies/00000001/manifest.json",
        "runs/r/checkpoints/0000-00000001/state.safetensors",
        "runs/r/config.json",
        "packs/p/rl.public.jsonl.zst",
        "runs/other/attempts/a-lost/0/t",
        "runs/r/attempts/a-unknown/0/t",
        "runs/r/attempts/a-lost/zero/t",
        "runs/r/attempts/a-lost",
    ]
    assert gone(*keys, *others) == []


def test_a_dry_run_deletes_nothing_and_a_real_one_what_it_said(engine: Engine, tmp_path: Path) -> None:
    objects = stores.connect(f"file:{tmp_path / 'objects'}")
    keys = [f"runs/r/attempts/a/{epoch}/trajectory" for epoch in range(2)]
    refs = [objects.put(key, b"x") for key in keys]
    policy = objects.put("runs/r/policies/00000000/manifest.json", b"{}")
    with engine.begin() as connection:
        _put(connection, refs[1])
    assert [one.key for one in sweep(engine, objects, "r", patience_s=60.0, delete=False)] == keys[:1]
    assert list(objects.list("runs/r/attempts/")) == keys
    assert [one.key for one in sweep(engine, objects, "r", patience_s=60.0, delete=True)] == keys[:1]
    assert list(objects.list("runs/r/")) == [keys[1], policy.key]


def _put(connection, trajectory: Ref) -> None:
    connection.execute(
        insert(Run).values(
            run_id="r", state="running", config=trajectory, code_version="", incarnation=0, created_at=0.0, spent_s=0.0,
            reason="", last_event=0, last_message=0, last_draw=0, last_ready=0,
        )
    )  # fmt: skip
    from tests.contract.test_ledger import ATTEMPT, GROUP, T

    packs = {"run_id": "r", "pack_hash": "h", "pack": trajectory, "pack_hidden": trajectory}
    problem = {"run_id": "r", "problem_id": "p", "pack_hash": "h", "category": "", "cell": "", "admitted_at": 0}
    connection.execute(insert(T["packs"]).values(packs))
    connection.execute(insert(T["problems"]).values(problem))
    connection.execute(insert(Group).values(GROUP))
    connection.execute(insert(Attempt).values({**ATTEMPT, "epoch": 1, "state": "scored", "trajectory": trajectory}))
