"""Ranks train what one process trains, and take the same decisions. Real processes, gloo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import deepspeed.comm
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import run_ranks
from safetensors.torch import load_file
from synthetic import policy, sequences

from services.trainer.context import own_rows
from services.trainer.dealing import Cost, deal, hand_out, imbalance
from services.trainer.engine import Engine
from services.trainer.mesh import BadMesh, Mesh
from services.trainer.packing import TrainSequence, form_units
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import Transformer

pytestmark = pytest.mark.timeout(2000)  # see rank_processes.DEADLINE_S
CONFIG = TrainConfig(learning_rate=1e-2, warmup_steps=0, norm_tokens=8.0, last_norm_learning_rate=0.05, mtp=False)
FULL = TrainConfig(learning_rate=1e-2, warmup_steps=0, norm_tokens=8.0, micro_batch_tokens=48, fp8=True, spike=4.0)
KL = msgspec.structs.replace(FULL, kl=0.1, kl_charge="to_go")  # its sums cross ranks
KL_BF16 = msgspec.structs.replace(
    KL, kl_charge="token"
)  # sums over what bf16 rounds are too noisy to be compared by direction
HERE = Path(__file__).parent


# Figures that the number of ranks changes: a unit that is split computes its prefix again, and every rank measures its own first
# micro-batch without replay.
BY_RANKS = ("prefix_", "tokens_fed", "replay_replaced", "mismatch_unreplayed")


def batch() -> list[TrainSequence]:
    """Five groups: they divide by neither two nor four, and one has contexts that cannot be shared."""
    rng = np.random.default_rng(3)
    found = sequences(rng, groups=5)
    other = rng.permutation(found[0].experts_TLK[0])[::-1].copy()
    rows = found[0].experts_TLK.copy()
    rows[0] = other
    return [replace(found[0], experts_TLK=rows), *found[1:]]


def long_sequences() -> list[TrainSequence]:
    """Eight groups of 8 with the lengths of the demo: prompts of 120 to 240 tokens, replies of 20 to 144."""
    rng, found = np.random.default_rng(0), []
    for group in range(8):
        prompt = int(rng.integers(120, 240))
        for _ in range(8):
            reply = int(rng.integers(20, 144))
            sampled = np.concatenate((np.zeros(prompt, bool), np.ones(reply, bool)))
            ones = np.ones(prompt + reply, np.float32)
            tokens = np.full(prompt + reply, group, np.int32)
            found.append(TrainSequence(group, tokens, sampled, -ones, np.zeros_like(tokens), ones, 1.0, None))
    return found


def other_policy() -> Transformer:
    return policy(9)


def trained(
    stage: int, context: int = 1, expert: int = 1, arithmetic: torch.dtype = torch.float32
) -> tuple[dict[str, float], Engine]:
    """Return the last metrics and the engine after two steps: router replay, MTP, FP8 and a KL penalty are on. A third, whose
    numbers are not finite in any group, moves nothing."""
    config = KL if arithmetic is torch.float32 else KL_BF16
    engine = Engine(
        policy(), config, zero_stage=stage, context_ranks=context, expert_ranks=expert, arithmetic=arithmetic
    )
    reference = other_policy()
    engine.experts.divide(reference)
    trainer = Trainer(engine, config, reference=reference)
    for step in (1, 2):
        result = trainer.train(batch(), 20, step, measure_replay=True)
        assert result.applied
        assert result.mtp_applied
    broken = trainer.train([replace(s, temperature=float("nan")) for s in batch()], 20, 3)
    assert broken.bad_groups == frozenset(range(5))
    return result.metrics, engine


def figures(metrics: Mapping[str, float]) -> list[float]:
    """Those that are the same whatever the layout, by name."""
    return [value for name, value in sorted(metrics.items()) if "seconds" not in name and not name.startswith(BY_RANKS)]


def test_ranks_agree_that_a_gradient_is_not_finite_wherever_it_lies() -> None:
    first, second = run_ranks(HERE / "ranks_that_decide.py", (), 2)
    assert (first.code, second.code) == (0, 0), (first.said, second.said)
    assert first.lines == second.lines
    assert [line.split()[:3] for line in first.lines[:3]] == [
        ["1", "True", "True"],
        ["2", "False", "False"],
        ["3", "True", "True"],
    ]


def test_one_process_reduces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[object] = []
    real = deepspeed.comm.all_reduce
    monkeypatch.setattr(
        deepspeed.comm, "all_reduce", lambda tensor, *a, **k: (reduced.append(tensor), real(tensor, *a, **k))[1]
    )
    trained = Trainer(Engine(policy(), CONFIG), CONFIG).train(sequences(np.random.default_rng(0), groups=2), 8, 1)
    assert trained.applied
    assert not reduced


@pytest.fixture(scope="module")
def one_process() -> tuple[dict[str, float], Engine]:
    return trained(0)


# ZeRO stage, context ranks, expert ranks: each group is one start of so many ranks.
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, ["1,1,1", "0,2,1", "0,1,2"]),
        (4, ["2,2,2"]),
        pytest.param(2, ["0,1,1", "2,1,1", "1,1,2", "2,1,2", "0,2,2"], marks=pytest.mark.nightly),
        pytest.param(3, ["2,3,1"], marks=pytest.mark.nightly),
        pytest.param(4, ["2,1,1", "0,4,1", "0,1,4", "1,2,2", "2,1,2"], marks=pytest.mark.nightly),
    ],
)
def test_ranks_train_what_one_process_trains(
    ranks: int, layouts: list[str], one_process: tuple[dict[str, float], Engine], tmp_path: Path
) -> None:
    metrics, engine = one_process
    expected = engine.state()
    ended = run_ranks(HERE / "ranks_of_a_step.py", [str(tmp_path), *(f"{layout},float32" for layout in layouts)], ranks)
    assert [rank.code for rank in ended] == [0] * ranks, [rank.said for rank in ended]
    assert all(rank.lines == ended[0].lines for rank in ended)  # every rank tells the same
    for layout, line in zip(layouts, ended[0].lines, strict=True):
        found = load_file(tmp_path / f"{layout},float32")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            if name.endswith(":exp_avg") and tensor.norm() > 0:
                # Masters follow AdamW's signs; the moments are the gradients.
                assert float((found[name] - tensor).norm() / tensor.norm()) <= 1e-5, (layout, name)
        again = Engine(other_policy(), KL)
        again.load(found)
        assert all(torch.equal(tensor, found[name]) for name, tensor in again.state().items())
        assert list(map(float, line.split())) == pytest.approx(figures(metrics), rel=1e-4, abs=1e-6), layout


def test_in_bf16_every_layout_points_where_one_process_points(tmp_path: Path) -> None:
    """Another order of addition rounds otherwise. That moves a gradient far less than bf16 itself moves it from float32's, which
    under FP8 and after a step has a cosine of 0.97 here."""
    expected = _moments(trained(0, arithmetic=torch.bfloat16)[1].state())
    layouts = ["1,1,1,bfloat16", "0,2,1,bfloat16", "0,1,2,bfloat16"]
    ended = run_ranks(HERE / "ranks_of_a_step.py", [str(tmp_path), *layouts], 2)
    assert [rank.code for rank in ended] == [0, 0], [rank.said for rank in ended]
    for layout in layouts:
        found = _moments(load_file(tmp_path / layout))
        assert float(torch.cosine_similarity(found, expected, 0)) > 0.99, layout


def _moments(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean gradients of all parameters, one after the other."""
    return torch.cat([state[name].flatten() for name in sorted(state) if name.endswith(":exp_avg")])


@given(seed=st.integers(0, 99), ranks=st.integers(2, 5), budget=st.integers(8, 90))
@settings(max_examples=60, deadline=None)
def test_every_sequence_is_dealt_once_and_every_rank_makes_as_many_micro_batches(
    seed: int, ranks: int, budget: int
) -> None:
    units = form_units(sequences(np.random.default_rng(seed), groups=1 + seed % 5), replay=True)
    dealt = deal(units, ranks, budget, Cost(10.0, 1.0))
    assert len({len(parts) for parts in dealt}) == 1
    found = [id(s) for parts in dealt for part in parts for unit in part for s in unit.sequences]
    assert sorted(found) == sorted(id(s) for unit in units for s in unit.sequences)
    assert dealt == deal(units, ranks, budget, Cost(10.0, 1.0))


def test_the_ranks_of_a_usual_batch_have_equal_work() -> None:
    units = form_units(long_sequences(), replay=False)
    assert imbalance(hand_out(units, 4, 4096, Cost(10.0, 0.01)), Cost(10.0, 0.01)) <= 1.05


def test_ranks_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(BadMesh, match="ETUDE_TRAINER_CONTEXT_RANKS: found 3 of 4 ranks; allowed: 1, 2, 4"):
        Mesh.of(0, 4, 3)
    with pytest.raises(BadMesh, match="ETUDE_TRAINER_EXPERT_RANKS: found 3 of 4 ranks; allowed: 1, 2, 4"):
        Mesh.of(0, 4, 1, 3)
    with pytest.raises(BadMesh, match="EXPERT_RANKS: found 4 for a model with 6 experts; allowed: 1, 2"):
        Mesh.of(0, 4, 1, 4).check_experts(6)
    with pytest.raises(BadMesh, match="found 2 for a model with 0 experts; allowed: 1"):
        Mesh.of(0, 2, 1, 2).check_experts(0)


@given(data=st.integers(1, 4), context=st.integers(1, 4), expert=st.sampled_from([1, 2, 4]))
def test_every_expert_is_held_once_in_every_group_and_summed_over_the_ranks_that_hold_it(
    data: int, context: int, expert: int
) -> None:
    world = data * context
    if world % expert:
        return
    meshes = [Mesh.of(rank, world, context, expert) for rank in range(world)]
    for group in meshes[0].expert_groups:
        assert [meshes[rank].expert_rank for rank in group] == list(range(expert))
    for part, group in enumerate(meshes[0].expert_data_groups):
        assert {meshes[rank].expert_rank for rank in group} == {part}
    for groups in (meshes[0].expert_groups, meshes[0].expert_data_groups):
        assert sorted(rank for group in groups for rank in group) == list(range(world))


@given(N=st.integers(0, 200), ranks=st.integers(1, 9))
def test_every_row_belongs_to_one_rank(N: int, ranks: int) -> None:
    assert sorted(np.concatenate([own_rows(N, rank, ranks) for rank in range(ranks)])) == list(range(N))
