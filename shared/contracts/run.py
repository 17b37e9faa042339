"""What a run is started with. Stored once as `runs/<run>/config.json`; `runs.control` refers to it.

Defaults learn on a laptop; what the demo sets otherwise: etude/demo/prepare.py. A field that is new says by its default what
its absence meant: stored runs go on as they began. Formulas and their sources: docs/recipe.md. The comment above or beside
a field is what docs/run.md says of it (`python -m infra.generate`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec


class Purpose(StrEnum):
    train = "train"
    evaluate = "evaluate"


class Ref(msgspec.Struct, frozen=True, kw_only=True):
    """A claim check: where bulk lies in the object store, how long it is and what it hashes to."""

    key: str
    size: int  # bytes
    checksum: str  # xxh3-128, 32 hex digits


Retry = Literal["fresh", "append"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Plain temperature sampling. top-p, top-k and penalties bias the importance ratios: there is no field for them."""

    temperature: float = 1.0  # 0 is greedy, for evaluation only
    # What the policy reads after a test that failed or a call that was broken. fresh: the task alone, with the files as they
    # were given; append: all that was said so far, and the answer (docs/recipe.md, "Fresh retries").
    retry: Retry = "append"
    max_completion_tokens: int = 224  # sampled and observed tokens after the prompt, per attempt
    max_turns: int = 6  # generations per attempt, but for those that only test again what has failed
    max_edits: int = 4  # per attempt, but for those that only bring back what has failed before
    max_repeats: int = 6  # tests of what had failed that use up neither a turn nor an edit, per attempt
    summary_trigger_tokens: int = 0  # a segment longer than this asks for a self-summary; 0: never


class LengthPenalty(msgspec.Struct, frozen=True, kw_only=True):
    """Subtracted from the reward: weight * C_{k,q}(x), C = ((1 + k x)^(1-q) - 1) / (k (1-q)), x in units of effort."""

    weight: float = 0.05  # factor of C
    k: float = 1.0  # how soon further effort costs less; 0: never, the penalty is linear
    q: float = 1.0  # 0: linear; 1: ln(1 + k x) / k; above 1: saturates at 1 / (k (q - 1))
    unit_tokens: float = 64.0  # effort x = weighted tokens / unit_tokens + weighted calls and turns
    # What a token of each role counts.
    token_weights: dict[str, float] = msgspec.field(
        default_factory=lambda: {"thinking": 1.0, "tool_call": 1.0, "tool_output": 0.5, "final": 1.0}
    )
    per_tool_call: float = 0.1  # units of effort
    per_turn: float = 0.1  # units of effort
    apply: Literal["solved", "all"] = "solved"  # attempts that it is subtracted from


# Behaviour terms that a run may give a weight. services/reward/behaviour.py computes them and says what each of them counts.
BEHAVIOUR = (
    "broken_tool_call",
    "no_submit",
    "terminal_only",
    "thoughts_in_comments",
    "todo_unfinished",
    "untested_submit",
)


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Terms of the reward. A group is fixed to one `id`; a new configuration in mid-run has a new id."""

    id: str = "default"  # named by every request and every score; 100 characters at most
    solved: float = 1.0  # for an attempt that passes every hidden and visible test
    length: LengthPenalty | None = msgspec.field(default_factory=LengthPenalty)  # None: no length penalty
    # Behaviour terms: name -> weight (docs/reward.md).
    behaviour: dict[str, float] = msgspec.field(default_factory=lambda: {"broken_tool_call": -0.05, "no_submit": -0.05})
    # Attempts that they are added to. As with the length penalty: where nearly all attempts fail, terms on all of them teach
    # a way of failing (measured: one generation without end breaks no call), and every group that failed as a whole costs a
    # training step's time.
    behaviour_apply: Literal["solved", "all"] = "solved"


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How problems are drawn and how far rollouts may run ahead."""

    group_size: int = 8  # G: attempts at each problem
    group_min: int = 4  # G_min: a group of fewer survivors is dropped and its problem returns
    replacements: int = 2  # R: how often an attempt lost to infrastructure is asked for again
    groups_per_step: int = 16  # with group_size: attempts in a step, 128; 1024 at most, since a message names them
    # Steps that a sample may be old when it is trained (docs/architecture.md, "Age, and the gate"); 128 at most
    max_staleness: int = 2
    hardness_sampling: bool = True  # problems that are hard but not hopeless are drawn more often; false: all alike
    # Seconds, five heartbeats; an attempt without heartbeat for so long is given to another worker
    lease_s: float = 10.0
    # Names of alerts that pause the run by themselves, the trainer too: fewer_solved (the collapse), reward_without_passes,
    # untested_submits, unsubmitted_attempts, broken_tool_calls, longer_attempts, gradient_not_finite, age_bound_breached. A
    # list of one's own takes the place of the whole
    pause_on: list[str] = msgspec.field(default_factory=list)
    max_steps: int = 0  # the run ends after so many; 0: no limit
    minutes: float = 0.0  # the run ends after so many, first request to last publication; 0: no limit
    # Weights of older versions are deleted while the run goes on, but for what is served, promoted, evaluated or needed to
    # build one that stays; nobody can go back to the others. Leave some, for whoever is just fetching one. 0: all stay
    keep_versions: int = 0
    # GB (1e9 bytes); a run whose objects take more, after what nobody needs was deleted, is paused with the alert
    # quota_exceeded (docs/runs.md). 0: no quota
    quota_gb: float = 0.0


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    """Which turn of an attempt earned its reward (services/trainer/credit.py)."""

    # attempt: every token of an attempt alike, as in Dr. GRPO; turn: the turns that brought it about (docs/recipe.md)
    per: Literal["attempt", "turn"] = "attempt"
    discount: float = 0.0  # of the reward, for every later turn that still had to change the files
    # Subtracted from a turn. broken: a call that could not be read or executed; repeated: it tested what had failed before;
    # gave_up: it submitted what had failed (with fresh retries both count for the files as given alone); endless: it came to
    # no end. Without the last two, giving up and rambling are the ways to make no more of the others.
    faults: dict[str, float] = msgspec.field(
        default_factory=lambda: {"broken": 0.2, "repeated": 0.25, "gave_up": 0.5, "endless": 0.5}
    )
    # Share of the groups in which no attempt earned anything that are trained, for their faults alone, and for the terms of the
    # reward that are subtracted from all attempts. Most faults are made there, so none at all leaves the faults as they are;
    # but they take the longest to compute.
    failed_share: float = 0.1


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    learning_rate: float = 5e-4  # of AdamW
    # Of the last norm's gain, the scale of all logits. With a rate of its own the policy becomes surer without its features
    # being rewritten for it (docs/results.md); 0: as everything else.
    last_norm_learning_rate: float = 0.0
    warmup_steps: int = 5  # the learning rate rises to its value over so many
    # Over this last share of the run's limit (minutes or steps, whichever is nearer) the policy's learning rates fall to
    # nothing, linearly, so that the last version is close to the mean of those before it. 0, or no limit: they do not fall.
    cooldown: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    weight_decay: float = 0.0  # of AdamW
    clip_norm: float = 1.0  # a gradient of a larger norm is scaled down to it
    credit: Credit = msgspec.field(default_factory=Credit)
    kl: float = 0.0  # coefficient of the k1 penalty against the reference (the base policy)
    importance_clip: float = 2.0  # importance weights (trainer's probability over sampler's) are cut off here
    # Above 0 the double-sided mask in place of the cut: tokens whose weight is below this or above `importance_clip` are left
    # out of the loss
    importance_floor: float = 0.0
    norm_tokens: float = 40.0  # the constant of Dr. GRPO: loss sum / (norm_tokens * attempts in the batch)
    router_replay: bool = True  # the sampler's experts are used again, with live gate scores
    replay_tau: float = 0.0  # plausibility filter; 0 keeps every replayed expert
    # The policy is sampled in FP8 (`ETUDE_SGLANG_QUANTIZATION`, `ETUDE_FP8`): the trainer's forward rounds as those engines do
    fp8: bool = False
    mtp: bool = True  # the MTP head follows the policy by distillation; the trunk never sees its gradient
    mtp_learning_rate: float = 3e-4  # of the MTP head alone
    # Computed at a time; larger ones fall out of a CPU's caches: 16384 took a third longer
    micro_batch_tokens: int = 4096
    base_every: int = 25  # versions: a full base is published every so many, deltas between
    # Steps between checkpoints of weights and optimiser. 1: the trainer's death costs no attempt; more, for large models:
    # what versions after the last checkpoint sampled grows older by it, and what gets too old is dropped
    checkpoint_every: int = 1


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    run: str  # its id, 100 characters at most
    seed: int = 1  # of sampling and of the order of problems
    base: Ref  # the manifest of the starting checkpoint's files (shared.weights.checkpoint_objects)
    pack: Ref  # public part of the problem pack (JSONL); rollout workers read it
    pack_hidden: Ref  # hidden tests; only graders read it
    # JSON, problem id -> nats: how surprising its reference repair is to the base policy (services/trainer/base/surprise.py).
    # The curator makes categories for the hardness estimate of it; without it they are the pack's own.
    surprise: Ref | None = None
    eval_pack: Ref | None = None  # public part of the held-out problems
    eval_pack_hidden: Ref | None = None  # their hidden tests
    sampling: Sampling = msgspec.field(default_factory=Sampling)  # limits of an attempt
    reward: RewardConfig = msgspec.field(default_factory=RewardConfig)
    schedule: ScheduleConfig = msgspec.field(default_factory=ScheduleConfig)
    train: TrainConfig = msgspec.field(default_factory=TrainConfig)
