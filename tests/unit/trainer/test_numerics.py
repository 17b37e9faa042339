"""Numerics promises of a step: sharing changes nothing, the MTP layer moves nothing else, KL pulls back."""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from synthetic import SHAPE, policy, sequences
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer import loss, packing, replay
from services.trainer.engine import BrokenWeights, Engine
from services.trainer.layout import attend_shared, lay_out
from services.trainer.masters import published_bits
from services.trainer.optimiser import Optimiser
from services.trainer.packing import TrainSequence
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import Transformer, causal_rows, published_tensors
from shared.model.moe import MixtureOfExperts
from shared.weights.blocks import in_fp8
from shared.weights.torch_tensors import from_bits

CONFIG = TrainConfig(learning_rate=1e-2, warmup_steps=0, norm_tokens=8.0, micro_batch_tokens=60)


def gradients(
    model: Transformer, found: list[TrainSequence], *, share: bool, tokens: int = 10_000
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for part in packing.micro_batches(packing.form_units(found, replay=True, share=share), tokens):
        batch = lay_out(part, follow=[True] * len(part))
        recorded = replay.build(part, SHAPE.num_moe_layers, SHAPE.num_experts_per_tok, 0.0)
        out = model(batch.tokens_N, batch.positions_N, attend_shared(batch.blocks), recorded)
        hidden = out.hidden_ND[batch.predict_S]
        logprobs, _ = loss.token_logprobs(hidden, model.head(), batch.target_S, batch.temperature_S)
        sampled = batch.sampled_logprobs_S
        loss.policy_loss(logprobs, sampled, None, batch.advantage_S, clip=2.0, kl=0.0, norm=10.0).backward()
        if (mtp := batch.mtp) is not None:
            residual = out.residual_ND.detach()[mtp.source_M]
            student = model.mtp(residual, mtp.next_M, mtp.positions_M, attend_shared(mtp.blocks))
            teacher = out.hidden_ND[mtp.teacher_R]
            loss.follow_loss(student[mtp.student_R], teacher, model.head()).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = float(b[name].abs().max())
        assert float((a[name] - b[name]).abs().max()) <= tolerance * max(scale, 1e-6), name


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_equal_with_and_without_prefix_sharing(seed: int) -> None:
    model, found = policy(), sequences(np.random.default_rng(seed), groups=3, attempts=6)
    assert_close(gradients(model, found, share=True), gradients(model, found, share=False))


def test_gradients_do_not_depend_on_how_the_batch_is_cut() -> None:
    model, found = policy(), sequences(np.random.default_rng(7), groups=3, attempts=6)
    assert_close(gradients(model, found, share=True, tokens=25), gradients(model, found, share=True))


def test_activations_that_are_computed_again_change_no_number() -> None:
    model, found = policy(), sequences(np.random.default_rng(5), groups=3, attempts=3)
    kept = gradients(model, found, share=True)
    model.recomputes = True
    model.zero_grad()
    again = gradients(model, found, share=True)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_the_packed_forward_is_the_plain_causal_forward() -> None:
    model, found = policy(), sequences(np.random.default_rng(3), groups=2, routed=False)
    units = packing.form_units(found, replay=True)
    batch = lay_out(units)
    with torch.no_grad():
        out = model(batch.tokens_N, batch.positions_N, attend_shared(batch.blocks))
        hidden = out.hidden_ND[batch.predict_S]
        packed, _ = loss.token_logprobs(hidden, model.head(), batch.target_S, batch.temperature_S)
        plain = []
        for s in (s for u in units for s in u.sequences):
            T = len(s.tokens_T)
            tokens = torch.as_tensor(s.tokens_T, dtype=torch.int64)
            alone = model(tokens, torch.arange(T), causal_rows(1, T))
            log_p = model.logits(alone.hidden_ND).log_softmax(-1)
            targets = np.flatnonzero(s.sampled_T)
            plain.append(log_p[targets - 1, tokens[targets]])
    assert torch.allclose(packed, torch.cat(plain), atol=1e-5)


def test_the_mtp_layout_is_the_plain_mtp_forward() -> None:
    """Where a prefix branches, its last position stands once per branch."""
    model, found = policy(), sequences(np.random.default_rng(5), groups=2, attempts=5, routed=False)
    units = packing.form_units(found, replay=True)
    batch = lay_out(units, follow=[True] * len(units))
    mtp = batch.mtp
    assert mtp is not None
    with torch.no_grad():
        out = model(batch.tokens_N, batch.positions_N, attend_shared(batch.blocks))
        student = model.mtp(out.residual_ND[mtp.source_M], mtp.next_M, mtp.positions_M, attend_shared(mtp.blocks))
        plain_students, plain_teachers = [], []
        for s in (s for u in units for s in u.sequences):
            T = len(s.tokens_T)
            tokens = torch.as_tensor(s.tokens_T, dtype=torch.int64)
            alone = model(tokens, torch.arange(T), causal_rows(1, T))
            ahead = model.mtp(alone.residual_ND[:-1], tokens[1:], torch.arange(T - 1), causal_rows(1, T - 1))
            t = np.flatnonzero(s.sampled_T) - 2  # position t predicts x_{t+2}, against the main head at t + 1
            t = t[t >= s.context - 1]
            plain_students.append(ahead[t])
            plain_teachers.append(alone.hidden_ND[t + 1])
    assert torch.allclose(student[mtp.student_R], torch.cat(plain_students), atol=1e-5)
    assert torch.allclose(out.hidden_ND[mtp.teacher_R], torch.cat(plain_teachers), atol=1e-5)


def test_replayed_experts_are_used_and_their_gate_learns() -> None:
    model, found = policy(), sequences(np.random.default_rng(0), groups=1)
    units = packing.form_units(found, replay=True)
    batch = lay_out(units)
    recorded = replay.build(units, 2, 2, 0.0)
    out = model(batch.tokens_N, batch.positions_N, attend_shared(batch.blocks), recorded)
    assert torch.equal(out.experts_NLK, recorded.experts_NLK)
    out.hidden_ND.sum().backward()
    assert float(model.layers[0].mlp.gate.weight.grad.abs().sum()) > 0


def test_a_segment_without_routing_routes_itself() -> None:
    a, b = sequences(np.random.default_rng(0), 1, 1), sequences(np.random.default_rng(1), 1, 1, routed=False)
    units = packing.form_units([*a, *b], replay=True)
    recorded = replay.build(units, 2, 2, 0.0)
    fed = [u.fed for u in units]
    assert recorded.valid_N.tolist() == [True] * fed[0] + [False] * fed[1]
    assert replay.build(units[1:], 2, 2, 0.0) is None


def updated(config: TrainConfig, found: list[TrainSequence], steps: int = 2, **options: object) -> Transformer:
    model = policy()
    trainer = Trainer(Engine(model, config), config, **options)
    for step in range(1, steps + 1):
        trainer.train(found, attempts=12, step=step)
    return model


def test_the_trunks_update_is_bit_equal_with_and_without_mtp() -> None:
    found = sequences(np.random.default_rng(0), groups=3)
    with_mtp = updated(CONFIG, found)
    without = updated(msgspec.structs.replace(CONFIG, mtp=False), found)
    start = policy()
    moved = 0
    for (name, a), (_, b), (_, c) in zip(
        with_mtp.named_parameters(), without.named_parameters(), start.named_parameters(), strict=True
    ):
        if name.startswith("mtp_layers"):
            assert torch.equal(b, c), name
            moved += not torch.equal(a, c)
        else:
            assert torch.equal(a, b), name
            assert not torch.equal(a, c), name
    assert moved > 10


def test_with_fp8_a_step_computes_with_what_fp8_engines_compute_with_and_moves_the_masters() -> None:
    found = sequences(np.random.default_rng(0), groups=3)
    config = msgspec.structs.replace(CONFIG, fp8=True)
    plain, rounding = updated(CONFIG, found, steps=1), updated(config, found, steps=1)
    for (name, a), (_, b), (_, c) in zip(
        plain.named_parameters(), rounding.named_parameters(), policy().named_parameters(), strict=True
    ):
        assert torch.isfinite(b).all(), name
        assert not torch.equal(b, c), name
        assert name.endswith("norm.weight") or not torch.equal(a, b), name
    assert rounding.emulates is None
    engine = Engine(policy(), config)
    with engine.forward_weights():
        assert engine.model.emulates == "fp8"
        inside = {name: tensor.clone() for name, tensor in published_tensors(engine.model).items()}
    expected = from_bits(in_fp8(published_bits(policy())))
    assert all(torch.equal(inside[name], expected[name].float()) for name in expected)


@pytest.mark.parametrize("fp8", [False, True])
def test_the_reference_computes_under_the_policys_roundings_so_that_equal_weights_have_no_divergence(fp8: bool) -> None:
    config = msgspec.structs.replace(CONFIG, fp8=fp8, kl=1.0)
    trainer = Trainer(Engine(policy(), config), config, reference=policy())
    batch = lay_out(packing.form_units(sequences(np.random.default_rng(0), groups=3), replay=True))
    with torch.no_grad(), trainer.engine.forward_weights():
        out = trainer._forward(trainer.engine.model, batch, True)
        own = trainer._logprobs(trainer.engine.model, out, batch)[0]
        reference = trainer._reference_logprobs(batch)
    assert torch.equal(own, reference)


def test_with_reward_zero_the_policy_moves_back_to_the_reference() -> None:
    reference = policy()
    drifted = policy()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in drifted.parameters():
            p.add_(0.05 * torch.randn_like(p))
    config = TrainConfig(learning_rate=3e-3, warmup_steps=0, kl=1.0, norm_tokens=8.0, mtp=False)
    trainer = Trainer(Engine(drifted, config), config, reference=copy.deepcopy(reference))
    contexts = sequences(np.random.default_rng(0), groups=8, attempts=1, routed=False)

    def divergence(found: list[TrainSequence]) -> float:
        """Mean KL(drifted || reference) over the contexts, exactly."""
        batch = lay_out(packing.form_units(found, replay=False))
        attend = attend_shared(batch.blocks)
        with torch.no_grad():
            q, p = (
                m.logits(m(batch.tokens_N, batch.positions_N, attend).hidden_ND[batch.predict_S]).log_softmax(-1)
                for m in (drifted, reference)
            )
        return float((q.exp() * (q - p)).sum(-1).mean())

    def on_policy() -> list[TrainSequence]:
        """64 tokens per context, drawn from the drifted policy; advantage 0."""
        found = []
        for s in contexts:
            T = s.context + 1
            tokens = torch.as_tensor(s.tokens_T[:T].copy(), dtype=torch.int64)
            with torch.no_grad():
                out = drifted(tokens[:-1], torch.arange(T - 1), causal_rows(1, T - 1))
                log_q = drifted.logits(out.hidden_ND[-1]).log_softmax(-1)
            for token in torch.multinomial(log_q.exp(), 64, replacement=True).tolist():
                logprobs = np.zeros(T, np.float32)
                logprobs[-1] = float(log_q[token])
                found.append(
                    replace(
                        s,
                        tokens_T=np.append(s.tokens_T[: T - 1], token),
                        sampled_T=np.arange(T) == T - 1,
                        logprobs_T=logprobs,
                        versions_T=s.versions_T[:T],
                        advantages_T=np.zeros(T, np.float32),
                    )
                )
        return found

    fixed = on_policy()
    before = divergence(fixed)
    for step in range(1, 31):
        trainer.train(on_policy(), attempts=512, step=step)
    assert divergence(fixed) < 0.6 * before


@pytest.mark.parametrize("stage", [0, 1])
def test_the_last_norm_moves_at_a_rate_of_its_own(stage: int) -> None:
    """AdamW's first step moves every parameter that has a gradient by its learning rate."""
    found = sequences(np.random.default_rng(0), groups=3)

    def moved(last_norm: float) -> dict[str, float]:
        config = msgspec.structs.replace(CONFIG, last_norm_learning_rate=last_norm)
        model, start = policy(), policy()
        Trainer(Engine(model, config, zero_stage=stage), config).train(found, attempts=12, step=1)
        ended = model.named_parameters()
        return {n: float((a - b).detach().abs().max()) for (n, a), b in zip(ended, start.parameters(), strict=True)}

    own, like_others = moved(0.05), moved(0.0)
    assert own["norm.weight"] == pytest.approx(0.05, rel=1e-3)
    assert like_others["norm.weight"] == pytest.approx(CONFIG.learning_rate, rel=1e-3)
    others = [name for name in own if name != "norm.weight"]
    assert [own[name] for name in others] == [like_others[name] for name in others]


def test_the_rates_fall_to_nothing_over_the_last_part_of_a_run() -> None:
    found = sequences(np.random.default_rng(0), groups=3)
    config = msgspec.structs.replace(CONFIG, cooldown=0.5, last_norm_learning_rate=0.05)

    def moved(progress: float) -> tuple[float, float, float]:
        """Greatest move of the head, the last norm and the MTP layers."""
        model, start = policy(), policy()
        Trainer(Engine(model, config), config).train(found, attempts=12, step=1, progress=progress)
        greatest = {"embed": 0.0, "norm.": 0.0, "mtp_l": 0.0}
        for (name, a), b in zip(model.named_parameters(), start.parameters(), strict=True):
            if name[:5] in greatest:
                greatest[name[:5]] = max(greatest[name[:5]], float((a - b).detach().abs().max()))
        return greatest["embed"], greatest["norm."], greatest["mtp_l"]

    full, half, last = moved(0.5), moved(0.75), moved(1.0)
    assert full == moved(0.0)
    assert half[:2] == pytest.approx((full[0] / 2, full[1] / 2), rel=1e-3)
    assert last[:2] == (0.0, 0.0)
    assert full[2] == half[2] == last[2] > 0  # they follow the policy to the end


@pytest.mark.parametrize("stage", [0, 1])
def test_fresh_moments_are_warmed_up_at_whichever_step_the_run_is(stage: int) -> None:
    """A run that goes back to a version without a checkpoint has none: Adam's first step moves a weight by its whole rate."""
    config = msgspec.structs.replace(CONFIG, warmup_steps=4)
    found = sequences(np.random.default_rng(0), groups=3)

    def moved(step: int) -> float:
        model, start = policy(), policy()
        Trainer(Engine(model, config, zero_stage=stage), config).train(found, attempts=12, step=step)
        return float((model.norm.weight - start.norm.weight).detach().abs().max())

    assert moved(1000) == moved(1) == pytest.approx(config.learning_rate / 4, rel=1e-3)


def test_prefixes_that_are_computed_again_in_each_micro_batch_are_not_reported_as_saved() -> None:
    config = msgspec.structs.replace(CONFIG, micro_batch_tokens=1)  # every branch by itself: nothing is shared
    metrics = (
        Trainer(Engine(policy(), config), config).train(sequences(np.random.default_rng(0), groups=3), 12, 1).metrics
    )
    assert metrics["prefix_saved_share"] == 0.0
    whole = msgspec.structs.replace(CONFIG, micro_batch_tokens=10_000)
    saved = Trainer(Engine(policy(), whole), whole).train(sequences(np.random.default_rng(0), groups=3), 12, 1).metrics
    assert saved["prefix_saved_share"] > 0.1
    assert metrics["prefix_lost_share"] == saved["prefix_lost_share"] == 0.0


def test_a_loss_is_never_divided_by_nothing() -> None:
    config = msgspec.structs.replace(CONFIG, norm_tokens=0.0)
    with pytest.raises(ValueError, match="norm_tokens: found 0; allowed: more than 0"):
        Trainer(Engine(policy(), config), config)


class Ops(TorchDispatchMode):
    """Names of all operations, of the backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_experts_are_combined_without_an_addition_whose_order_cuda_leaves_open() -> None:
    torch.manual_seed(0)
    experts = MixtureOfExperts(SHAPE)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(20, 32, requires_grad=True)
    with Ops() as seen:
        out, routing = experts(x)
        out.square().sum().backward()
    assert "_grouped_mm" in seen.names
    assert seen.names.isdisjoint({"index_add", "index_add_", "index_put", "index_put_"})
    parts = []
    for row, chosen in zip(x, routing.experts_NK, strict=True):
        scores = (experts.gate.weight @ row).softmax(-1)[chosen]
        gates = scores / scores.sum()
        hidden = [torch.nn.functional.silu(g) * u for g, u in ((experts.gate_up[e] @ row).chunk(2) for e in chosen)]
        parts.append(sum(gate * (experts.down[e] @ h) for gate, e, h in zip(gates, chosen, hidden, strict=True)))
    plain = torch.stack(parts)
    assert torch.allclose(out, plain, rtol=1e-4, atol=1e-4)
    (expected,) = torch.autograd.grad(plain.square().sum(), x)
    assert torch.allclose(x.grad, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("before", [0, 1], ids=["first-step", "later-step"])
def test_without_signal_nothing_moves(stage: int, before: int) -> None:
    """Of a first step without a gradient AdamW has no step count: the last norm's own rate once divided by it, and every weight
    of the run became NaN."""
    config = msgspec.structs.replace(CONFIG, last_norm_learning_rate=0.05)
    found = sequences(np.random.default_rng(0), groups=2)
    model = policy()
    trainer = Trainer(Engine(model, config, zero_stage=stage), config)
    for step in range(before):
        trainer.train(found, attempts=8, step=1 + step)
    start = copy.deepcopy(model)
    trained = trainer.train(
        [replace(s, advantages_T=np.zeros_like(s.advantages_T)) for s in found], attempts=8, step=1 + before
    )
    assert trained.applied
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    trainer.train(found, attempts=8, step=2 + before)
    whole = policy()
    without = Trainer(Engine(whole, config, zero_stage=stage), config)
    for step in range(before + 1):
        without.train(found, attempts=8, step=1 + step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def test_an_update_that_leaves_a_weight_that_is_not_finite_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(CONFIG, last_norm_learning_rate=0.05)
    monkeypatch.setattr(Optimiser, "_moved", lambda self, before, p, rate: torch.full_like(p, torch.nan))
    trainer = Trainer(Engine(policy(), config), config)
    with pytest.raises(BrokenWeights, match=r"step 7: .*'norm\.weight'"):
        trainer.train(sequences(np.random.default_rng(0), groups=2), attempts=8, step=7)


def test_a_group_whose_numbers_are_not_finite_is_left_out_and_named() -> None:
    found = sequences(np.random.default_rng(0), groups=3)
    model, healthy = policy(), policy()
    broken = [replace(s, temperature=float("nan")) if s.group == 1 else s for s in found]
    trained = Trainer(Engine(model, CONFIG), CONFIG).train(broken, attempts=12, step=1)
    assert trained.bad_groups == {1}
    assert trained.applied
    Trainer(Engine(healthy, CONFIG), CONFIG).train([s for s in found if s.group != 1], attempts=12, step=1)
    for a, b in zip(model.parameters(), healthy.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_a_group_that_broke_after_it_had_moved_the_weights_counts_as_trained() -> None:
    """Else its problem came again, and was trained twice."""
    config = msgspec.structs.replace(CONFIG, micro_batch_tokens=1)  # every branch by itself
    found = sequences(np.random.default_rng(0), groups=2)
    broken = [*found[:-1], replace(found[-1], temperature=float("nan"))]
    trained = Trainer(Engine(policy(), config), config).train(broken, attempts=8, step=1)
    assert trained.applied
    assert not trained.bad_groups


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_is_not_finite_moves_nothing(stage: int) -> None:
    found = sequences(np.random.default_rng(0), groups=2)
    model = policy()
    huge = [replace(s, advantages_T=np.full_like(s.advantages_T, 3e38)) for s in found]
    trained = Trainer(Engine(model, CONFIG, zero_stage=stage), CONFIG).train(huge, attempts=1, step=1)
    assert not trained.applied
    for (name, a), b in zip(model.named_parameters(), policy().parameters(), strict=True):
        assert torch.equal(a, b) or name.startswith("mtp_layers")


def test_zero_stages_agree_and_exchange_their_state() -> None:
    """A checkpoint is by tensor name: written under one ZeRO stage, read under another."""
    found = sequences(np.random.default_rng(0), groups=3)
    results = []
    for stage in (0, 1):
        model = policy()
        engine = Engine(model, CONFIG, zero_stage=stage)
        trainer = Trainer(engine, CONFIG)
        for step in (1, 2):
            trainer.train(found, attempts=12, step=step)
        state = engine.state()
        other = policy(9)
        resumed = Engine(other, CONFIG, zero_stage=1 - stage)
        resumed.load(state)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        trainer.train(found, attempts=12, step=3)
        Trainer(resumed, CONFIG).train(found, attempts=12, step=3)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
        results.append(model)
    for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
