"""What a run is started with. Stored once as `runs/<run>/config.json`; `runs.control` refers to it.

Defaults learn on a laptop. Formulas and their sources: docs/recipe.md.
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


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Plain temperature sampling. top-p, top-k and penalties bias the importance ratios: there is no field for them."""

    temperature: float = 1.0  # 0 is greedy, for evaluation only
    max_completion_tokens: int = 224  # sampled and observed tokens after the prompt, per attempt
    max_turns: int = 6  # generations per attempt, but for those that only test again what has failed
    max_edits: int = 4  # likewise
    summary_trigger_tokens: int = 0  # a segment longer than this asks for a self-summary; 0: never


class LengthPenalty(msgspec.Struct, frozen=True, kw_only=True):
    """Subtracted from the reward: weight * C_{k,q}(x), C = ((1 + k x)^(1-q) - 1) / (k (1-q)), x in units of effort."""

    weight: float = 0.05
    k: float = 1.0
    q: float = 1.0  # 0: linear; 1: ln(1 + k x) / k; above 1: saturates at 1 / (k (q - 1))
    unit_tokens: float = 64.0  # effort x = weighted tokens / unit_tokens + weighted calls and turns
    token_weights: dict[str, float] = msgspec.field(
        default_factory=lambda: {"thinking": 1.0, "tool_call": 1.0, "tool_output": 0.5, "final": 1.0}
    )
    per_tool_call: float = 0.1
    per_turn: float = 0.1
    apply: Literal["solved", "all"] = "solved"


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Terms of the reward. A group is fixed to one `id`; a new configuration in mid-run has a new id."""

    id: str = "default"
    solved: float = 1.0
    length: LengthPenalty | None = msgspec.field(default_factory=LengthPenalty)
    # Behaviour terms: name -> weight. services/reward/behaviour.py holds them all, and what each of them counts.
    behaviour: dict[str, float] = msgspec.field(default_factory=lambda: {"broken_tool_call": -0.05, "no_submit": -0.05})
    # As with the length penalty: where nearly all attempts fail, terms on all of them teach a way of failing (measured: one
    # generation without end breaks no call), and every group that failed as a whole costs a training step's time.
    behaviour_apply: Literal["solved", "all"] = "solved"


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How problems are drawn and how far rollouts may run ahead."""

    group_size: int = 8  # G
    group_min: int = 4  # G_min: below it a group is dropped and its problem returns
    replacements: int = 2  # R: how often an attempt lost to infrastructure is asked for again
    groups_per_step: int = 16
    max_staleness: int = 2  # steps, per sample (the gate, design section "Age")
    hardness_sampling: bool = True  # False: uniform
    lease_s: float = 10.0  # five heartbeats; an attempt without heartbeat for so long is given to another worker
    max_steps: int = 0  # 0: no limit
    minutes: float = 0.0  # first request to last publication; 0: no limit


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    """Which turn of an attempt earned its reward (services/trainer/credit.py)."""

    per: Literal["attempt", "turn"] = "attempt"  # attempt: every token of an attempt alike, as in Dr. GRPO
    discount: float = 0.0  # of the reward, for every later turn that still had to change the files
    # Subtracted from a turn. broken: a call that could not be read or executed; repeated: it tested what had failed before;
    # gave_up: it submitted what had failed; endless: it came to no end. Without the last two, giving up and rambling are
    # the ways to make no more of the others.
    faults: dict[str, float] = msgspec.field(
        default_factory=lambda: {"broken": 0.2, "repeated": 0.25, "gave_up": 0.5, "endless": 0.5}
    )
    # Share of the groups in which no attempt earned anything that are trained, for their faults alone. Most faults are made
    # there, so none at all leaves the faults as they are; but they take the longest to compute.
    failed_share: float = 0.1


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    learning_rate: float = 5e-4
    warmup_steps: int = 5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    credit: Credit = msgspec.field(default_factory=Credit)
    kl: float = 0.0  # k1 coefficient against the reference (the base policy)
    importance_clip: float = 2.0  # truncated importance weights
    norm_tokens: float = 40.0  # the constant of Dr. GRPO: loss sum / (norm_tokens * attempts in the batch)
    router_replay: bool = True
    replay_tau: float = 0.0  # plausibility filter; 0 keeps every replayed expert
    mtp: bool = True  # the MTP head follows the policy by distillation; the trunk never sees its gradient
    mtp_learning_rate: float = 3e-4
    micro_batch_tokens: int = 4096  # larger ones fall out of a CPU's caches: 16384 took a third longer
    base_every: int = 25  # a full base every so many versions
    checkpoint_every: int = 10  # steps


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    seed: int = 1
    base: Ref  # the manifest of the starting checkpoint's files (shared.weights.checkpoint_objects)
    pack: Ref  # public part of the problem pack (JSONL); rollout workers read it
    pack_hidden: Ref  # hidden tests; only graders read it
    # JSON, problem id -> nats: how surprising its reference repair is to the base policy (services/trainer/base/surprise.py).
    # The curator makes categories for the hardness estimate of it; without it they are the pack's own.
    surprise: Ref | None = None
    eval_pack: Ref | None = None
    eval_pack_hidden: Ref | None = None
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    reward: RewardConfig = msgspec.field(default_factory=RewardConfig)
    schedule: ScheduleConfig = msgspec.field(default_factory=ScheduleConfig)
    train: TrainConfig = msgspec.field(default_factory=TrainConfig)
