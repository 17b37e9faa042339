"""A tiny policy and synthetic groups for it: real checkpoints, real trajectories and routing, a real object store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from services.trainer.packing import TrainSequence
from shared.contracts.ids import attempt_prefix
from shared.contracts.messages import AttemptKey, Effort, GroupMember, GroupReady, StopReason
from shared.contracts.run import Ref, RunConfig, ScheduleConfig, TrainConfig
from shared.contracts.trajectory import Segment, Trajectory, pack, pack_routing
from shared.model import ModelConfig, Transformer, save_checkpoint
from shared.objects import Objects
from shared.weights.checkpoint_objects import upload_directory

RUN = "r-test"
V, L, E, K = 64, 2, 4, 2
SHAPE = ModelConfig.from_dict(
    {
        "model_type": "qwen3_moe",
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": L,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": E,
        "num_experts_per_tok": K,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "num_nextn_predict_layers": 1,
        "initializer_range": 0.3,
    }
)


def policy(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(SHAPE)


def routing(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Different experts per row, as a router's selection is."""
    first = rng.integers(0, E, (rows, L, 1))
    return np.concatenate((first, (first + rng.integers(1, E, (rows, L, 1))) % E), 2).astype(np.uint8)


def sequences(rng: np.random.Generator, groups: int, attempts: int = 4, *, routed: bool = True) -> list[TrainSequence]:
    """`groups` prompts with `attempts` completions each; sampled and observed tokens mixed."""
    found = []
    for g in range(groups):
        prompt = rng.integers(0, V, int(rng.integers(3, 9)))
        prompt_rows = routing(rng, len(prompt))
        for _ in range(attempts):
            length = int(rng.integers(1, 12))
            sampled = rng.random(length) < 0.7
            sampled[0] = True
            T = len(prompt) + length
            rows = np.concatenate((prompt_rows, routing(rng, length)))[: T - 1]
            found.append(
                TrainSequence(
                    group=g,
                    tokens_T=np.concatenate((prompt, rng.integers(0, V, length))).astype(np.int32),
                    sampled_T=np.concatenate((np.zeros(len(prompt), bool), sampled)),
                    logprobs_T=np.full(T, -4.0, np.float32),
                    versions_T=np.zeros(T, np.int32),
                    advantages_T=np.full(T, rng.normal(), np.float32),
                    temperature=1.0,
                    experts_TLK=rows if routed else None,
                )
            )
    return found


def run_config(
    objects: Objects, directory: Path, train: TrainConfig | None = None, groups_per_step: int = 2
) -> RunConfig:
    """Uploads the tiny policy as the run's base and stores the configuration. The packs are never read by the trainer."""
    save_checkpoint(policy(), directory)
    base = upload_directory(objects, f"runs/{RUN}/base", directory)
    empty = objects.put(f"runs/{RUN}/pack.jsonl", b"")
    config = RunConfig(
        run=RUN,
        base=base,
        pack=empty,
        pack_hidden=empty,
        schedule=ScheduleConfig(groups_per_step=groups_per_step, group_size=4, max_staleness=9),
        train=train or TrainConfig(learning_rate=1e-2, checkpoint_every=2, base_every=3, norm_tokens=8.0),
    )
    return config


def put_config(objects: Objects, config: RunConfig) -> Ref:
    return objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(config))


def group(
    objects: Objects, number: int, *, version: int = 0, rewards: tuple[float, ...] = (1.0, 0.0, 0.0, 0.2)
) -> GroupReady:
    """Group `number`, as rollout, reward and scheduler would have left it; the second attempt has a self-summary."""
    rng = np.random.default_rng(number)
    members = []
    drawn = sequences(rng, 1, len(rewards))
    for index, (s, reward) in enumerate(zip(drawn, rewards, strict=True)):
        key = AttemptKey(
            attempt=f"a-{number}-{index}", epoch=0, group=f"g-{number}", problem=f"p-{number}", index=index
        )
        segments, rows = [_segment(s, version)], [s.experts_TLK]
        if index == 1:
            later = replace(sequences(rng, 1, 1)[0])
            segments.append(_segment(later, version))
            rows.append(later.experts_TLK)
        prefix = attempt_prefix(RUN, key.attempt, key.epoch)
        trajectory = Trajectory(
            key=key,
            stop=StopReason.submitted,
            temperature=1.0,
            effort=Effort(),
            segments=segments,
            routing=objects.put(f"{prefix}/routing", pack_routing([r for r in rows if r is not None])),
        )
        ref = objects.put(f"{prefix}/trajectory", pack(trajectory))
        members.append(
            GroupMember(
                attempt=key.attempt,
                epoch=0,
                trajectory=ref,
                reward=reward,
                oldest_version=version,
                solved=reward == 1.0,
            )
        )
    named = {"group": f"g-{number}", "problem": f"p-{number}", "sequence": number}
    return GroupReady(run=RUN, **named, members=members, expected=0.1)


def _segment(s: TrainSequence, version: int) -> Segment:
    sampled = s.sampled_T
    return Segment(
        tokens=s.tokens_T,
        loss_mask=sampled,
        logprobs=np.where(sampled, s.logprobs_T, 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
        oldest_kv_version=version,
    )
