"""Speculation leaves the output's distribution exactly the trunk's, whatever the drafts are, and is used only where it pays."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.inference import batching, metrics
from services.inference.gate import Gate
from services.inference.speculation import Draft, verify
from shared.model import causal_rows
from tests.unit.inference.test_engine_equals_model import (
    DEEPSEEK,
    QWEN3,
    QWEN3_MOE,
    Asked,
    ask_a_mix,
    build,
    check,
    engine_of,
    mixed,
)

__all__ = ["engine_of"]
MTP = {"num_nextn_predict_layers": 1}
KINDS = pytest.mark.parametrize("config", [QWEN3_MOE | MTP, QWEN3 | MTP, DEEPSEEK | MTP], ids=["moe", "dense", "mla"])


def fits(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of a chi-square test; cells that expect fewer than 5 are taken together."""
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    wanted = wanted * observed.sum() / wanted.sum()
    freedom, distance = (len(wanted) - 1) / 2, ((observed - wanted) ** 2 / wanted).sum() / 2
    return float(torch.special.gammaincc(torch.tensor(freedom).double(), torch.tensor(distance).double()))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 3), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_judged_drafts_are_distributed_as_the_trunk_says(seed, k, temperature):
    """Two tokens of a made-up process whose next distribution depends on the last token alone."""
    V, D = 5, 20_000
    random = np.random.default_rng(seed)
    trunk_VV = torch.from_numpy(random.normal(0, 2, (V, V)).astype(np.float32))  # logits after each token
    mtp_VV = torch.from_numpy(random.normal(0, 2, (V, V)).astype(np.float32))
    q_VV = (mtp_VV / temperature).softmax(-1)
    q_VV[q_VV < 0.05] = 0  # what is never proposed must come from the rest
    q_VV /= q_VV.sum(-1, keepdim=True)
    below_VV = q_VV.double().numpy().cumsum(-1)
    below_VV /= below_VV[:, -1:]
    tokens_DK, last_D = np.zeros((D, k), int), np.zeros(D, int)
    for position in range(k):  # the first token whose share, with all before it, exceeds a uniform number
        last_D = (below_VV[last_D] <= random.random((D, 1))).sum(-1)
        tokens_DK[:, position] = last_D
    drafts = [Draft(tokens, q_VV[[0, *tokens[:-1]]].numpy()) for tokens in tokens_DK.tolist()]
    logits = torch.cat([trunk_VV[[0, *d.tokens]] for d in drafts])
    uniforms = random.random(D * (1 + k))
    verdict = verify(logits, drafts, np.full(D, temperature), np.zeros(D, bool), uniforms, random)
    p_VV = (trunk_VV / temperature).softmax(-1).double().numpy()
    first = np.bincount([t[0] for t in verdict.tokens], minlength=V)
    assert fits(first, D * p_VV[0]) > 1e-6
    second = np.zeros((V, V))
    for tokens in verdict.tokens:
        if len(tokens) > 1:
            second[tokens[0], tokens[1]] += 1
    for token in range(V):
        if second[token].sum() > 50:
            assert fits(second[token], second[token].sum() * p_VV[token]) > 1e-6
    for tokens, logprobs in zip(verdict.tokens[:100], verdict.logprobs[:100], strict=True):
        expected = [np.log(p_VV[a, b]) for a, b in itertools.pairwise([0, *tokens])]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("N", [6_000, pytest.param(50_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("V", "C", "temperature"),
    [(5, 4, 0.7), (5, 4, 1.0), (32, 3, 0.7), (32, 3, 1.0)],
    ids=["in_torch_cooler", "in_torch", "compiled_cooler", "compiled"],
)
def test_short_continuations_of_the_engine_are_distributed_as_the_models(V, C, temperature, N, engine_of):
    model = build(QWEN3_MOE | MTP | {"vocab_size": V, "num_hidden_layers": 2})
    engine = engine_of(model, rows=64, positions=16, draft_tokens=2, gated=False)
    prompt = np.array([0, 1, 2])
    asked = [Asked(engine, prompt, C, temperature=temperature, routing_start=-1) for _ in range(1000)]
    counts = np.zeros(V**C)
    accepted = 0
    for _ in range(N // 1000):
        results = [a.result() for a in asked]
        asked = [Asked(engine, prompt, C, temperature=temperature, routing_start=-1) for _ in range(1000)]
        for result in results:
            counts[int(np.dot(result.tokens_C, V ** np.arange(C)[::-1]))] += 1
            accepted += result.accepted
    assert accepted > N / 10
    expected = []  # of every continuation, in order
    for tokens in itertools.product(range(V), repeat=C - 1):
        whole = torch.tensor([*prompt, *tokens])
        out = model(whole, torch.arange(len(whole)), causal_rows(1, len(whole)))
        logprobs = (model.logits(out.hidden_ND)[len(prompt) - 1 :] / temperature).log_softmax(-1).numpy()
        expected.append(sum(logprobs[i, t] for i, t in enumerate(tokens)) + logprobs[-1])
    assert fits(counts, N * np.exp(np.concatenate(expected))) > 1e-5


@KINDS
@pytest.mark.parametrize("k", [1, 3])
def test_greedy_text_is_the_same_with_drafts(config, k, engine_of):
    model = build(config)
    plain, drafting = engine_of(model), engine_of(model, draft_tokens=k, gated=False)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 64, int(rng.integers(1, 40))) for _ in range(10)]
    wanted = [Asked(plain, p, 25, temperature=0.0) for p in prompts]
    found = [Asked(drafting, p, 25, temperature=0.0) for p in prompts]
    for one, other in zip(wanted, found, strict=True):
        assert one.result().tokens_C.tolist() == other.result().tokens_C.tolist()
    assert sum(f.result().judged for f in found) > 0


@KINDS
@pytest.mark.parametrize("gated", [False, True])
def test_log_probabilities_and_routing_are_the_trunks_under_any_mix(config, gated, engine_of, monkeypatch):
    lots = np.random.default_rng(3)
    monkeypatch.setattr(Gate, "wants", lambda self, sessions: lots.random() < 0.7)  # the way changes all the time
    model, judged, steps = build(config), 0, 0
    engine = engine_of(model, draft_tokens=2, gated=gated)
    rng = np.random.default_rng(1)
    for _ in range(3):
        turns = ask_a_mix(engine, rng)
        following = []
        for turn in turns:
            result = turn.result()
            check(model, turn, result)
            assert len(result.tokens_C) == turn.request.max_new_tokens
            judged, steps = judged + result.judged, steps + len(result.tokens_C) - result.accepted
            more = np.concatenate([turn.tokens, result.tokens_C, rng.integers(0, 64, int(rng.integers(0, 8)))])
            following.append(Asked(engine, more, 5))
        for turn in following:
            check(model, turn, turn.result())
    assert 0 < judged < steps


@KINDS
def test_what_is_proposed_is_what_the_models_mtp_layer_says(config, engine_of):
    model = build(config)
    engine = engine_of(model, draft_tokens=2, gated=False, prefill_tokens=64)
    seen = []
    propose = engine.batch.drafter.propose

    def watched(hidden, computed, wanted, *rest):
        drafts = propose(hidden, computed, wanted, *rest)
        ends = (computed.starts + computed.lengths)[wanted]
        seen.extend(zip(ends.tolist(), drafts, strict=True))
        return drafts

    engine.batch.drafter.propose = watched
    asked = Asked(engine, np.random.default_rng(5).integers(0, 64, 37), 30)
    result = asked.result()
    whole = torch.from_numpy(np.concatenate([asked.tokens, result.tokens_C])).long()
    for newest, draft in seen[:5] + seen[-5:]:  # x[newest] was the last token when it was proposed
        tokens = torch.cat([whole[: newest + 1], torch.tensor(draft.tokens)])
        n = newest  # positions that the trunk had computed
        out = model(tokens[:n], torch.arange(n), causal_rows(1, n))
        keys: list[torch.Tensor] = []

        def attend(layer, q, k, v, keys=keys):
            """Of one token more, over the keys of all before it."""
            if not keys:
                keys += [k, v]
                return causal_rows(1, len(k))(layer, q, k, v)
            R = q.shape[1] // k.shape[1]
            all_k, all_v = (torch.cat(pair).repeat_interleave(R, 1) for pair in ((keys[0], k), (keys[1], v)))
            weights = torch.einsum("nhd,mhd->hnm", q, all_k).softmax(-1)
            return torch.einsum("hnm,mhd->nhd", weights, all_v)

        state = model.mtp(out.residual_ND, tokens[1 : n + 1], torch.arange(n), attend)
        expected = [model.mtp_logits(state[-1:])]
        layer, embedded = model.config.num_hidden_layers, model.embed_tokens(tokens[n + 1 : n + 2])
        chained = model.mtp_layers[0](layer, embedded, state[-1:], model.rotary(torch.tensor([n])), attend)
        expected.append(model.mtp_logits(chained))
        for found, logits in zip(draft.probabilities_KV, expected, strict=False):  # the last draft may be cut short
            np.testing.assert_allclose(found, logits.softmax(-1)[0].numpy(), atol=1e-5)
    assert len(seen) > 10


def test_accepted_drafts_never_reach_beyond_a_stop_token_or_the_end(engine_of):
    model = build(QWEN3_MOE | MTP)
    engine = engine_of(model, draft_tokens=3, gated=False)
    asked = [Asked(engine, np.arange(10), 80, stop_tokens=frozenset(range(0, 64, 5))) for _ in range(60)]
    for one in asked:
        result = one.result()
        check(model, one, result)
        if result.finish.type == "stop":
            assert result.finish.matched == result.tokens_C[-1]
        assert all(t % 5 for t in result.tokens_C[:-1])
    end = Asked(engine, np.arange(60), 1000)
    assert len(end.result().tokens_C) == 96 - 60 + 1
    check(model, end, end.result())


def test_a_swap_in_mid_generation_with_drafts_in_hand(engine_of):
    old, new = build(QWEN3_MOE | MTP, seed=0), build(QWEN3_MOE | MTP, seed=1)
    engine = engine_of(old, draft_tokens=2, gated=False)
    count = 0

    def progress(_token: int, _logprob: float, _serial: int) -> None:
        nonlocal count
        count += 1
        if count == 10:
            engine.swap(new, 7)

    asked = Asked(engine, np.arange(20), 30, progress=progress)
    result = asked.result()
    cut = int((result.versions_C == 0).sum())
    assert result.versions_C.tolist() == [0] * cut + [7] * (30 - cut)
    assert 10 <= cut <= 12  # the step that was under way
    check(old, asked, result, upto=cut)
    exact = [copy.deepcopy(model).double() for model in (old, new)]
    expected, routing = mixed(*exact, asked.tokens, result, cut)
    np.testing.assert_allclose(result.logprobs_C[cut:], expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(np.sort(result.routing, -1), routing)
    assert result.judged > 0


def test_a_seed_gives_the_same_tokens_with_and_without_drafts(engine_of):
    model = build(QWEN3_MOE | MTP)
    plain, drafting = engine_of(model), engine_of(model, draft_tokens=2, gated=False)
    beside = [Asked(drafting, np.arange(3, 30), 20) for _ in range(3)]
    accepted = 0
    for seed in range(12):
        one, other = Asked(plain, np.arange(10), 20, seed=seed), Asked(drafting, np.arange(10), 20, seed=seed)
        assert one.result().tokens_C.tolist() == other.result().tokens_C.tolist()
        check(model, other, other.result())
        accepted += other.result().accepted
    assert accepted > 0
    [b.result() for b in beside]


def test_a_model_without_an_mtp_layer_just_decodes(engine_of):
    model = build(QWEN3_MOE)
    engine = engine_of(model, draft_tokens=2, gated=False)
    asked = Asked(engine, np.arange(10), 10)
    check(model, asked, asked.result())
    assert asked.result().judged == 0


def by_place() -> np.ndarray:
    """Drafts that were made, and that were accepted, at places 1 to 3."""
    counters = (metrics.DRAFTED, metrics.ACCEPTED)
    return np.array([[metrics.total(counter, place=str(place)) for place in (1, 2, 3)] for counter in counters])


def test_what_is_proposed_and_accepted_is_counted_by_place(engine_of):
    model, new = build(QWEN3_MOE | MTP | {"vocab_size": 32}), 60
    engine = engine_of(model, draft_tokens=3, gated=False)
    before = by_place()
    steps: list[int] = []  # in which each token was sampled
    result = Asked(engine, np.arange(20), new, temperature=5.0, progress=lambda *_: steps.append(engine.steps)).result()
    given = [len(list(tokens)) for _, tokens in itertools.groupby(steps)]  # tokens of each step
    sampled = list(itertools.accumulate(given))
    drafted = [min(3, new - there - 1) for there in sampled[:-1]]  # one more token comes with them
    made, accepted = (by_place() - before).tolist()
    assert made == [sum(n >= place for n in drafted) for place in (1, 2, 3)]
    assert accepted == [sum(n > place for n in given[1:]) for place in (1, 2, 3)]
    assert (made[0], sum(accepted)) == (result.judged, result.accepted)
    assert accepted[2] > 0


def test_the_engine_drafts_where_its_own_measurement_says_that_it_pays_and_stops_where_it_does_not(
    engine_of, monkeypatch
):
    """The clock is the test's: it stands still but for what a step costs here. Everything else is as ever."""
    engine = engine_of(build(QWEN3_MOE | MTP | {"vocab_size": 32}), draft_tokens=1)
    clock = SimpleNamespace(now=0.0, drafts=1.0, steps=0, drafted=0)
    monkeypatch.setattr(batching, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    forward = engine.batch._forward

    def costing(rows, positions, decoding, feeds, chunks):
        drafted = bool((feeds > 1).any())
        clock.now += clock.drafts if drafted else 1.0
        clock.steps, clock.drafted = clock.steps + 1, clock.drafted + drafted
        return forward(rows, positions, decoding, feeds, chunks)

    monkeypatch.setattr(engine.batch, "_forward", costing)

    def share() -> float:
        """Of the steps of one session, those that judged drafts."""
        clock.steps = clock.drafted = 0
        Asked(engine, np.arange(4), 90, temperature=5.0).result()
        return clock.drafted / clock.steps

    assert share() == 0
    assert any(share() > 0.9 for _ in range(40))  # a draft costs nothing here
    clock.drafts = 4.0
    assert any(share() == 0 for _ in range(40))
    clock.drafts = 1.0
    assert any(share() > 0.9 for _ in range(200))
