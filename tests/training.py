"""One step of the trainer on recorded attempts, with a tiny random policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.rollout.recorder import Recorder
from services.trainer.credit import assign
from services.trainer.engine import Engine
from services.trainer.groups import sequences_of
from services.trainer.step import Trainer
from shared.contracts.messages import AttemptKey, Effort, StopReason
from shared.contracts.run import Credit, TrainConfig
from shared.contracts.trajectory import Trajectory, pack, unpack
from shared.model import ModelConfig, Transformer


def stored(number: int, recorder: Recorder, effort: Effort) -> Trajectory:
    """Return the trajectory of an attempt as the trainer reads it from the object store."""
    made = Trajectory(
        key=AttemptKey(attempt=f"a{number}", epoch=0, group="g", problem="p", index=number),
        stop=StopReason.submitted,
        temperature=1.0,
        effort=effort,
        segments=recorder.segments(),
    )
    return unpack(pack(made))


def require_a_step(trajectories: Sequence[Trajectory], rewards: Sequence[float], vocabulary: int, sampled: int) -> None:
    """Train the attempts as one group. Every one of the `sampled` tokens must get its attempt's advantage, and the weights must
    change."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = ModelConfig.from_dict({"model_type": "qwen3", "vocab_size": vocabulary, **sizes, **heads})
    torch.manual_seed(0)
    train = TrainConfig(learning_rate=1e-2, warmup_steps=0, norm_tokens=8.0)
    engine = Engine(Transformer(config), train)
    before = {name: value.clone() for name, value in engine.state().items()}
    shares = assign(trajectories, rewards, Credit(per="attempt"), lot=0.5)
    trained = 0
    sequences = []
    for trajectory, share, reward in zip(trajectories, shares, rewards, strict=True):
        for sequence in sequences_of(trajectory, None, share, config):
            advantages = sequence.advantages_T[sequence.sampled_T]
            assert np.all(advantages == np.float32(reward - np.mean(rewards)))
            trained += len(advantages)
            sequences.append(sequence)
    assert trained == sampled
    assert Trainer(engine, train).train(sequences, len(trajectories), 1).applied
    assert any(not torch.equal(before[name], value) for name, value in engine.state().items())
