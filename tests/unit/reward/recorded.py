"""A run of recorded attempts on a real ledger and store, for tests of what is done with records."""

from __future__ import annotations

from pathlib import Path

import msgspec
from sqlalchemy import insert

from services.reward.rescore import Record
from services.reward.score import score
from shared import ledger
from shared import objects as stores
from shared.contracts.graded import Finding, Graded, verdict_key
from shared.contracts.messages import AttemptKey, Effort, Verdict
from shared.contracts.run import RewardConfig, RunConfig
from shared.contracts.trajectory import pack
from shared.ledger.models import Attempt, Base, Group, Run, VerdictRow
from shared.problems.pack import write
from tests.guard.problems import fixed
from tests.unit.reward.conftest import make

RIGHT, WRONG = Verdict(solved=True, passed=2, total=2), Verdict(solved=False, passed=0, total=2)
SIX = ["broken_tool_call", "no_submit", "terminal_only", "thoughts_in_comments", "todo_unfinished", "untested_submit"]


def record(
    name: str, group: str, *, solved: bool, tokens: int = 64, config: RewardConfig | None = None, **found: float
) -> Record:
    graded = Graded(
        verdict=RIGHT if solved else WRONG, findings={n: Finding(a) for n, a in found.items()}, grader="g", terms=SIX
    )
    effort, config = Effort(thinking_tokens=tokens), config or RewardConfig()
    reward, terms = score(config, graded.verdict, effort, graded.findings)
    return Record(name, group, "p", 0, graded.verdict, effort, reward, terms, config.id, graded)


def recorded(folder: Path) -> Path:
    """A run of four scored attempts in two groups; the verdict of the last is not stored any more. Solved ones hold the
    solution, the last one the broken files."""
    objects, engine = (
        stores.connect(f"file:{folder / 'objects'}"),
        ledger.connect(f"sqlite:///{folder / 'ledger.db'}"),
    )
    ledger.upgrade(engine)
    (problem, hidden) = fixed()[0]
    packs = objects.put("pack", write([problem])), objects.put("hidden", write([hidden]))
    config = RunConfig(run="r-1", base=packs[0], pack=packs[0], pack_hidden=packs[1])
    ref = objects.put("runs/r-1/config.json", msgspec.json.encode(config))
    run = {
        "run_id": "r-1", "state": "running", "config": ref, "code_version": "", "incarnation": 1, "created_at": 0.0,
        "spent_s": 0.0, "reason": "", "last_event": 0, "last_message": 0, "last_draw": 0, "last_ready": 0,
    }  # fmt: skip
    rows = Base.metadata.tables
    with engine.begin() as connection:
        connection.execute(insert(Run).values(run))
        connection.execute(
            insert(rows["packs"]).values(run_id="r-1", pack_hash="h", pack=packs[0], pack_hidden=packs[1])
        )
        connection.execute(
            insert(rows["problems"]).values(
                run_id="r-1", problem_id=problem.id, pack_hash="h", category="", cell="", admitted_at=0
            )
        )
        for number in range(2):
            connection.execute(
                insert(Group).values(
                    run_id="r-1",
                    group_id=f"g{number}",
                    problem_id=problem.id,
                    number=number,
                    draw=number,
                    size=2,
                    state="dropped",
                    reward_config="default",
                    requested_at=0.0,
                    members=0,
                    solved=0,
                    turns=0.0,
                    thinking_tokens=0.0,
                    versions=[],
                    step=0,
                    reason="",
                )
            )
        for number, solved in enumerate((True, True, True, False)):
            calls = ("edit", "test", "submit") if number % 2 else ("edit", "submit")
            trajectory = make(*calls, files={**problem.files, **hidden.solution} if solved else problem.files)
            one = record(f"a{number}", f"g{number // 2}", solved=solved, broken_tool_call=float(number == 2))
            ref = objects.put(f"t{number}", pack(trajectory))
            connection.execute(
                insert(Attempt).values(
                    run_id="r-1",
                    attempt_id=one.attempt,
                    group_id=one.group,
                    place=number % 2,
                    epoch=0,
                    state="scored",
                    policy_floor=0,
                    worker="",
                    requested_at=0.0,
                    reason="",
                    effort=one.effort,
                    trajectory=ref,
                )
            )
            connection.execute(
                insert(VerdictRow).values(
                    run_id="r-1",
                    attempt_id=one.attempt,
                    epoch=0,
                    reward=one.reward,
                    solved=solved,
                    terms=dict(one.terms),
                    verdict=one.verdict,
                    reward_config="default",
                    scored_at=0.0,
                )
            )
            key = AttemptKey(attempt=one.attempt, epoch=0, group=one.group, problem=problem.id)
            graded = msgspec.structs.replace(one.graded, terms=["broken_tool_call", "no_submit"])
            if number < 3:
                objects.put(verdict_key("r-1", key, ref), msgspec.json.encode(graded))
    engine.dispose()
    return folder


def every_byte(folder: Path) -> dict[str, bytes]:
    """Of the objects and the ledger; what SQLite keeps beside it while somebody reads is left out."""
    kept = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".db-shm", ".db-wal", ".toml", ".png")
    ]
    return {str(path): path.read_bytes() for path in kept}
