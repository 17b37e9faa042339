"""What each service may do with objects, as the policy of its key in the syntax of AWS, which MinIO shares.

Invariants
- Nobody writes what another one vouches for: a worker that runs agents writes no verdict, a grader no policy.
- The hidden parts of packs are read by those who run them (curator, grader) and by who uploads them (cli).
- A policy names no bucket but its own, and allows nothing on it but to look at the names of its objects. Everybody may do
  that: without it S3 answers 403, not 404, for an object that is not there, and services live by that difference.

In a policy `*` stands for slashes too, and `?` for one of any character. So a run is written with as many as its id has: what
is allowed below `attempts/` of a run is nowhere else below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.contracts.ids import CHECKPOINT, OPEN_EVALUATIONS

RUN = "runs/r-????????T??????-????"  # shared.contracts.ids.new_run_id
CONFIG = f"{RUN}/config.json"
FIRST_GUESSES = (f"{RUN}/surprise.json", f"{RUN}/probe.json")  # of what is hard
CONFIGS = f"{RUN}/config-*.json"  # of `etude reconfigure`; reward and trainer read each that runs.state names
BASES = (f"{RUN}/base/*", "checkpoints/*")  # of the run's own upload, and imported ones
TREES = "trees/*"  # source trees, by their content; of repository problems
ROOTS = "bases/*"  # root file systems of sandboxes, by their content and by name
PUBLIC, HIDDEN = "packs/*.public.jsonl.zst", "packs/*.hidden.jsonl.zst"
TRAJECTORIES, ROUTING = f"{RUN}/attempts/*/trajectory-*", f"{RUN}/attempts/*/routing-*"
RESUMES = f"{RUN}/attempts/*/{CHECKPOINT}*"  # rollout checkpoints
VERDICTS = f"{RUN}/attempts/*/verdict*"
ANSWERS = "grading/*"
JUDGEMENTS = "judge/*"  # answers of the rubric judge, by their questions
POLICIES, CHECKPOINTS, INCARNATIONS = f"{RUN}/policies/*", f"{RUN}/checkpoints/*", f"{RUN}/incarnations/*"
OPEN = f"{OPEN_EVALUATIONS}*"
EVALUATIONS = f"{RUN}/evals/*"
SWEPT = (f"{RUN}/attempts/*", POLICIES)  # what nobody needs any more is deleted there


@dataclass(frozen=True, slots=True)
class Keys:
    """Which keys one of us reads, writes (and writes over), deletes."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()


OBJECTS: dict[str, Keys] = {
    "curator": Keys(reads=(CONFIG, *FIRST_GUESSES, *BASES, PUBLIC, HIDDEN, TREES, ROOTS)),
    "scheduler": Keys(reads=(CONFIG, CONFIGS, OPEN, f"{RUN}/checkpoints/*.json", INCARNATIONS), deletes=SWEPT),
    "rollout": Keys(
        reads=(CONFIG, *BASES, PUBLIC, TREES, ROOTS, RESUMES),
        writes=(TRAJECTORIES, ROUTING, RESUMES),
        deletes=(RESUMES,),
    ),
    "inference": Keys(reads=(CONFIG, *BASES, POLICIES)),
    "reward": Keys(reads=(CONFIG, CONFIGS, ANSWERS), deletes=(ANSWERS,)),
    "grader": Keys(
        reads=(CONFIG, *BASES, PUBLIC, HIDDEN, TREES, ROOTS, TRAJECTORIES, VERDICTS, JUDGEMENTS),
        writes=(VERDICTS, ANSWERS, JUDGEMENTS),
    ),
    "trainer": Keys(
        reads=(CONFIG, CONFIGS, *BASES, TRAJECTORIES, ROUTING, POLICIES, CHECKPOINTS, INCARNATIONS),
        writes=(POLICIES, CHECKPOINTS, INCARNATIONS),
        deletes=(CHECKPOINTS,),
    ),
    "evaluator": Keys(
        reads=(CONFIG, PUBLIC, OPEN, EVALUATIONS),
        writes=(OPEN, EVALUATIONS),
        deletes=(OPEN, f"{RUN}/evals/*/parts/*"),
    ),
    "console": Keys(reads=(CONFIG, *BASES, PUBLIC, TREES, TRAJECTORIES, ROUTING, VERDICTS), writes=(CONFIG,)),
    # People. The first is asked by `etude up` and `etude doctor` whether it may write: below `reach/`.
    "cli": Keys(
        reads=("*",),
        writes=(CONFIG, CONFIGS, *FIRST_GUESSES, *BASES, PUBLIC, HIDDEN, TREES, ROOTS, "reach/*"),
        deletes=(ROOTS, "reach/*"),
    ),
    "sweep": Keys(reads=(OPEN,), deletes=SWEPT),  # `etude ledger sweep --delete`
}


def policy(keys: Keys, bucket: str) -> dict[str, Any]:
    """The policy document of a key that may do this and no more."""
    unfinished = ["s3:ListBucketMultipartUploads"] if keys.writes else []
    statements = [
        _statement("Names", ["s3:GetBucketLocation", "s3:ListBucket", *unfinished], [f"arn:aws:s3:::{bucket}"]),
        _statement("Read", ["s3:GetObject"], _named(bucket, keys.reads)),
        _statement(
            "Write",
            ["s3:PutObject", "s3:ListMultipartUploadParts", "s3:AbortMultipartUpload"],
            _named(bucket, keys.writes),
        ),
        _statement("Delete", ["s3:DeleteObject"], _named(bucket, keys.deletes)),
    ]
    return {"Version": "2012-10-17", "Statement": [one for one in statements if one["Resource"]]}


def _statement(name: str, actions: list[str], resources: list[str]) -> dict[str, Any]:
    return {"Sid": name, "Effect": "Allow", "Action": actions, "Resource": resources}


def _named(bucket: str, keys: tuple[str, ...]) -> list[str]:
    return [f"arn:aws:s3:::{bucket}/{key}" for key in keys]


HEAD = ("keys", "reads", "writes", "deletes")


def overview() -> list[tuple[str, ...]]:
    """A line for each kind of key, as HEAD; a run's id as RUN, and `cli`, which reads all of them, only where it writes."""
    ways: tuple[Callable[[Keys], tuple[str, ...]], ...] = (
        lambda one: one.reads,
        lambda one: one.writes,
        lambda one: one.deletes,
    )
    kinds = dict.fromkeys(key for one in OBJECTS.values() for way in ways for key in way(one) if key != "*")
    return [
        (
            kind.replace(RUN, "runs/RUN"),
            *(", ".join(who for who, one in OBJECTS.items() if kind in way(one)) for way in ways),
        )
        for kind in sorted(kinds)
    ]
