"""What a run is started with. Stored once as `runs/<run>/config.json`; `runs.commands` and `runs.state` refer to it.

Defaults learn on a laptop; what the demo sets otherwise: etude/demo/prepare.py. A field that is new says by its default what
its absence meant: stored runs go on as they began. Formulas and their sources: docs/recipe.md. The comment above or beside
a field is what docs/run.md says of it (`python -m infra.generate`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from shared.contracts.allowed import Length, Names, Number

# What a message carries of a configuration, so that none grows too large for the bus (64 KiB): every message the run's name, a
# request its reward's, a step's the names of its groups (26 bytes each) and two figures of every version that sampled for them
# (55 bytes each). The trainer says that only when weights and checkpoint are written.
NAME_CHARS, GROUPS, STALENESS = 100, 1024, 128
STRONGEST = 1e6  # beside a term of this weight float32 still tells a solved attempt from another

Name = Annotated[str, Length(NAME_CHARS, "so that the run's messages fit the bus")]
Count = Annotated[int, Number(least=0)]
Positive = Annotated[int, Number(least=1)]
Share = Annotated[float, Number(least=0, most=1)]
Weight = Annotated[float, Number(least=0, most=STRONGEST)]


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

    temperature: Annotated[float, Number(above=0, most=10)] = 1.0  # an evaluation also samples at 0, greedily
    # What the policy reads after a test that failed or a call that was broken. fresh: the task alone, with the files as they
    # were given; append: all that was said so far, and the answer (docs/recipe.md, "Fresh retries").
    retry: Retry = "append"
    max_completion_tokens: Positive = 224  # sampled and observed tokens after the prompt, per attempt
    max_turns: Positive = 6  # generations per attempt, but for those that only test again what has failed
    max_edits: Positive = 4  # per attempt, but for those that only bring back what has failed before
    max_repeats: Count = 6  # tests of what had failed that use up neither a turn nor an edit, per attempt
    # Tokens of a segment, prompt included. When a tool's answer makes the segment longer than this, the agent is asked to
    # summarise its work, and goes on in a new segment that holds the task and the summary; 0: never
    summary_trigger_tokens: Count = 0
    # Sampled in one turn; a longer one is cut, and the agent goes on. 0: no limit. A repository problem's own limit wins.
    max_turn_tokens: Count = 0


# Roles of the tokens that an attempt spends.
ROLES = ("thinking", "tool_call", "tool_output", "final")


class LengthPenalty(msgspec.Struct, frozen=True, kw_only=True):
    """Subtracted from the reward: weight * C_{k,q}(x), C = ((1 + k x)^(1-q) - 1) / (k (1-q)), x in units of effort."""

    weight: Weight = 0.05  # factor of C
    k: Weight = 1.0  # how soon further effort costs less; 0: never, the penalty is linear
    # 0: linear; 1: ln(1 + k x) / k; above 1: saturates at 1 / (k (q - 1))
    q: Annotated[float, Number(least=0, most=100)] = 1.0
    # Effort x = weighted tokens / unit_tokens + weighted calls and turns
    unit_tokens: Annotated[float, Number(above=0)] = 64.0
    # What a token of each role counts.
    token_weights: Annotated[dict[str, float], Names(ROLES, Number(least=0, most=STRONGEST))] = msgspec.field(
        default_factory=lambda: {"thinking": 1.0, "tool_call": 1.0, "tool_output": 0.5, "final": 1.0}
    )
    per_tool_call: Weight = 0.1  # units of effort
    per_turn: Weight = 0.1  # units of effort
    apply: Literal["solved", "all"] = "solved"  # attempts that it is subtracted from


def terms() -> tuple[str, ...]:
    """Return the names of the behaviour terms that are installed: the project's own, and those of other packages."""
    from shared.terms import names  # late: it reads trajectories, which read this

    return names()


NO_TERM = "another package may bring more by entry points of the group etude.reward_terms (docs/reward.md)"


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Terms of the reward. A group is fixed to one `id`; a new configuration in mid-run has a new id."""

    id: Name = "default"  # named by every request and every score
    solved: Weight = 1.0  # for an attempt that passes every hidden and visible test
    length: LengthPenalty | None = msgspec.field(default_factory=LengthPenalty)  # None: no length penalty
    # Behaviour terms: name -> weight (docs/reward.md).
    behaviour: Annotated[dict[str, float], Names(terms, Number(least=-STRONGEST, most=STRONGEST), NO_TERM)] = (
        msgspec.field(default_factory=lambda: {"broken_tool_call": -0.05, "no_submit": -0.05})
    )
    # Attempts that the behaviour terms are added to: solved ones alone, or all. With all, a policy that solves almost nothing
    # learns to fail without a penalty: in a measurement it wrote one endless generation, which breaks no call. Groups in which
    # every attempt failed then have a signal too, and training on them takes time.
    behaviour_apply: Literal["solved", "all"] = "solved"


# Names of the alerts that services raise about a run; docs/alerts.md says what each means.
ALERT_NAMES = (
    "age_bound_breached",
    "broken_tool_calls",
    "configuration",
    "fewer_solved",
    "gradient_not_finite",
    "gradient_spike",
    "groups_dropped",
    "ledger_behind",
    "longer_attempts",
    "mtp_gradient_not_finite",
    "pack_unusable",
    "problems_refused",
    "problems_unproven",
    "quota_exceeded",
    "replica_lags",
    "requests_repeated",
    "reward_without_passes",
    "rollback_refused",
    "staleness_breach",
    "steps_skipped",
    "term_quarantined",
    "trained_twice",
    "unknown_groups",
    "unsubmitted_attempts",
    "untested_submits",
    "version_damaged",
)

ALWAYS_PAUSE = frozenset({"quota_exceeded", "steps_skipped"})  # alerts that pause a run whatever its `pause_on` says


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How problems are drawn and how far rollouts may run ahead."""

    group_size: Annotated[int, Number(least=2, most=128)] = 8  # G: attempts at each problem
    # G_min, at most group_size: a group of fewer survivors is dropped and its problem returns
    group_min: Annotated[int, Number(least=2, most=128)] = 4
    replacements: Count = 2  # R: how often an attempt lost to infrastructure is asked for again
    # With group_size: attempts in a step, 128. A message names all of a step's groups
    groups_per_step: Annotated[int, Number(least=1, most=GROUPS)] = 16
    # Steps that a sample may be old when it is trained (docs/architecture.md, "Age, and the gate")
    max_staleness: Annotated[int, Number(least=0, most=STALENESS)] = 2
    hardness_sampling: bool = True  # problems that are hard but not hopeless are drawn more often; false: all alike
    # Seconds. When no heartbeat of a claimed attempt has come for so long, the scheduler counts it as lost and requests it
    # again. Workers send one every ETUDE_ROLLOUT_HEARTBEAT_S (2): keep the lease at several of them
    lease_s: Annotated[float, Number(above=0, most=86_400)] = 10.0
    # Names of alerts that pause the run by themselves, the trainer too, such as fewer_solved (the collapse) or
    # gradient_not_finite. A list of one's own takes the place of the whole
    pause_on: Annotated[list[str], Names(ALERT_NAMES)] = msgspec.field(default_factory=list)
    max_steps: Annotated[int, Number(least=0, zero="no limit")] = 0  # the run ends after so many; 0: no limit
    # Weight of the run when the rollout workers' slots are divided among runs: with 7 and 3 one gets 70 %, the other 30 %
    # (docs/runs.md)
    share: Annotated[float, Number(least=0.001, most=1000)] = 1.0
    # The run ends after so many, first request to last publication; 0: no limit
    minutes: Annotated[float, Number(least=0, zero="no limit")] = 0.0
    # Weights of older versions are deleted while the run goes on, but for what is served, promoted, evaluated or needed to
    # build one that stays; nobody can go back to the others. Leave some, for whoever is just fetching one. 0: all stay
    keep_versions: Annotated[int, Number(least=0, zero="all stay")] = 0
    # GB (1e9 bytes); a run whose objects take more, after what nobody needs was deleted, is paused with the alert
    # quota_exceeded (docs/runs.md). 0: no quota
    quota_gb: Annotated[float, Number(least=0, zero="no quota")] = 0.0


# Faults of a turn that the recorder notes (shared.contracts.trajectory.Span), and "broken".
FAULTS = ("broken", "repeated", "gave_up", "endless")


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    """Which turn of an attempt earned its reward (services/trainer/credit.py)."""

    # attempt: every token of an attempt alike, as in Dr. GRPO; turn: the turns that brought it about (docs/recipe.md)
    per: Literal["attempt", "turn"] = "attempt"
    discount: Share = 0.0  # of the reward, for every later turn that still had to change the files
    # Subtracted from a turn. broken: a call that could not be read or executed; repeated: it tested what had failed before;
    # gave_up: it submitted what had failed (with fresh retries both count for the files as given alone); endless: it came to
    # no end. Without the last two, giving up and rambling are the ways to make no more of the others.
    faults: Annotated[dict[str, float], Names(FAULTS, Number(least=0, most=STRONGEST))] = msgspec.field(
        default_factory=lambda: {"broken": 0.2, "repeated": 0.25, "gave_up": 0.5, "endless": 0.5}
    )
    # Share of the groups in which no attempt earned anything that are trained, for their faults alone, and for the terms of the
    # reward that are subtracted from all attempts. Most faults are made there, so none at all leaves the faults as they are;
    # but they take the longest to compute.
    failed_share: Share = 0.1


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    learning_rate: Share = 5e-4  # of AdamW
    # Of the last norm's gain, the scale of all logits. With a rate of its own the policy becomes surer without its features
    # being rewritten for it (docs/results.md); 0: as everything else.
    last_norm_learning_rate: Share = 0.0
    warmup_steps: Count = 5  # the learning rate rises to its value over so many
    # Over this last share of the run's limit (minutes or steps, whichever is nearer) the policy's learning rates fall to
    # nothing, linearly, so that the last version is close to the mean of those before it. 0, or no limit: they do not fall.
    cooldown: Share = 0.0
    betas: Annotated[tuple[float, float], Number(least=0, below=1)] = (0.9, 0.95)  # of AdamW
    weight_decay: Annotated[float, Number(least=0, most=100)] = 0.0  # of AdamW
    clip_norm: Annotated[float, Number(above=0)] = 1.0  # a gradient of a larger norm is scaled down to it
    # A gradient of more than so many times the median norm of the last 32 steps is a spike: its step is skipped, as if it were
    # not finite. 0: no gradient is
    spike: Annotated[float, Number(least=0, zero="none is a spike")] = 0.0
    credit: Credit = msgspec.field(default_factory=Credit)
    kl: Weight = 0.0  # coefficient of the k1 penalty against the reference (the base policy)
    # Of that penalty a token is charged its own k1 (token), or the k1 of itself and of all later tokens of its context (to_go),
    # which is the gradient of the whole sequence's KL and far noisier
    kl_charge: Literal["token", "to_go"] = "token"
    # Importance weights (trainer's probability over sampler's) are cut off here
    importance_clip: Annotated[float, Number(above=0)] = 2.0
    # Above 0 the double-sided mask in place of the cut: tokens whose weight is below this or above `importance_clip` are left
    # out of the loss
    importance_floor: Share = 0.0
    # The constant of Dr. GRPO: loss sum / (norm_tokens * attempts in the batch). 0: sampling.max_completion_tokens
    norm_tokens: Annotated[float, Number(least=0, zero="sampling.max_completion_tokens")] = 0.0
    router_replay: bool = True  # the sampler's experts are used again, with live gate scores
    replay_tau: Share = 0.0  # plausibility filter; 0 keeps every replayed expert
    # The policy is sampled in FP8 (`ETUDE_SGLANG_QUANTIZATION`, `ETUDE_FP8`): the trainer's forward rounds as those engines do.
    # mxfp8, nvfp4: in those formats, which the embedded engine emulates
    fp8: bool | Literal["mxfp8", "nvfp4"] = False
    mtp: bool = True  # the MTP head follows the policy by distillation; the trunk never sees its gradient
    mtp_learning_rate: Share = 3e-4  # of the MTP head alone
    # Computed at a time; larger ones fall out of a CPU's caches: 16384 took a third longer
    micro_batch_tokens: Positive = 4096
    # Versions from one full base to the next. A full base holds all weights; the versions between hold what changed since the
    # version before. 1: every version is a full base
    base_every: Positive = 25
    # Steps between checkpoints of weights and optimiser. 1: the trainer's death costs no attempt; more, for large models:
    # what versions after the last checkpoint sampled grows older by it, and what gets too old is dropped
    checkpoint_every: Positive = 1


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    run: Name  # its id
    seed: Annotated[int, Number(least=0, most=2**63 - 1)] = 1  # of sampling and of the order of problems
    base: Ref  # the manifest of the starting checkpoint's files (shared.weights.checkpoint_objects)
    pack: Ref  # public part of the problem pack (JSONL); rollout workers read it
    pack_hidden: Ref  # hidden tests; only graders read it
    # JSON, problem id -> nats: how surprising its reference repair is to the base policy (services/trainer/base/surprise.py).
    # The curator makes categories for the hardness estimate of it; without it they are the pack's own.
    surprise: Ref | None = None
    # JSON that `etude tasks probe` writes: how often a checkpoint solved some of the problems. The scheduler takes it as its first
    # evidence of hardness; without it a run begins with none.
    probe: Ref | None = None
    eval_pack: Ref | None = None  # public part of the held-out problems
    eval_pack_hidden: Ref | None = None  # their hidden tests
    sampling: Sampling = msgspec.field(default_factory=Sampling)  # limits of an attempt
    reward: RewardConfig = msgspec.field(default_factory=RewardConfig)
    schedule: ScheduleConfig = msgspec.field(default_factory=ScheduleConfig)
    train: TrainConfig = msgspec.field(default_factory=TrainConfig)

    @property
    def normaliser(self) -> float:
        """The constant that a step's loss is divided by for each attempt."""
        return self.train.norm_tokens or float(self.sampling.max_completion_tokens)
