"""The engine computes what the model computes, whatever is batched, cached, copied, chunked or swapped around it."""

from __future__ import annotations

import contextlib
import copy
import threading

import numpy as np
import pytest
import torch

from services.inference.engine import Engine, Overloaded
from services.inference.request import Request, Result
from shared.model import ModelConfig, Transformer, causal_rows
from tests.patience import patient

# Logits of a standard deviation above 1 (`check`): a wrong RoPE or router bias would show. At 0.3, with heads of 8, the plain
# model's own float32 was up to 2.6e-5 away from its float64, and no engine could hold 1e-5.
SCALE = 0.21
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "initializer_range": SCALE,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32768,
    "initializer_range": SCALE,
}
QWEN3 = {k: v for k, v in QWEN3_MOE.items() if "expert" not in k and "moe" not in k} | {
    "model_type": "qwen3",
    "intermediate_size": 48,
}
LLAMA = QWEN3 | {
    "model_type": "llama",
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
QWEN2 = QWEN3 | {"model_type": "qwen2", "tie_word_embeddings": False}


def build(config: dict = QWEN3_MOE, seed: int = 0) -> Transformer:
    """A tiny random model whose logits are spread wide enough (over all 64 tokens in a row) that a wrong rotation or router
    bias would show."""
    torch.manual_seed(seed)
    model = Transformer(ModelConfig.from_dict(config)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_(0, 0.5)
    everything = torch.arange(64) % model.config.vocab_size
    assert float(model.logits(model(everything, everything, causal_rows(1, 64)).hidden_ND).std()) >= 1
    return model


@pytest.fixture
def engine_of():
    """Starts engines and ends them with the test."""
    started: list[Engine] = []

    def make(model: Transformer, **changes) -> Engine:
        options = {"rows": 12, "positions": 96, "prefill_tokens": 16, "queue_limit": 1000, **changes}
        engine = Engine(model, 0, **options)
        engine.start()
        started.append(engine)
        return engine

    yield make
    for engine in started:
        engine.stop()


class Asked:
    """A request handed to an engine; `result()` waits for it."""

    def __init__(self, engine: Engine, tokens: np.ndarray, new: int, **more) -> None:
        self.tokens = np.asarray(tokens, np.int32)
        self.temperature = more.get("temperature", 1.0)
        self._done = threading.Event()
        self._result: Result | None = None
        self.request = Request(
            rid="r", tokens_P=self.tokens, max_new_tokens=new, done=self._finish, **{"routing_start": 0, **more}
        )
        engine.submit(self.request)

    def _finish(self, result: Result) -> None:
        self._result = result
        self._done.set()

    def result(self) -> Result:
        assert self._done.wait(patient(60)), "no answer"
        assert self._result is not None
        return self._result


def ask_a_mix(engine: Engine, rng: np.random.Generator) -> list[Asked]:
    """Nine at once, of many lengths and temperatures; five of them begin alike."""
    prompts = [rng.integers(0, 64, int(rng.integers(1, 45))) for _ in range(5)]
    prompts += [np.concatenate([prompts[0], rng.integers(0, 64, n)]) for n in (0, 0, 1, 9)]  # a group
    return [
        Asked(engine, p, int(rng.integers(1, 20)), temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5]))) for p in prompts
    ]


def check(model: Transformer, asked: Asked, result: Result, upto: int | None = None) -> None:
    """Log-probabilities and routing of a result against one plain forward over prompt and answer, in float64: of two
    forwards in float32 each would add its own rounding, which together passes the bound now and then."""
    model = copy.deepcopy(model).double()
    whole = np.concatenate([asked.tokens, result.tokens_C])
    P, C = len(asked.tokens), len(result.tokens_C)
    out = model(torch.from_numpy(whole).long(), torch.arange(len(whole)), causal_rows(1, len(whole)))
    logits = model.logits(out.hidden_ND)
    logprobs = (logits[P - 1 : P + C - 1] / (asked.temperature or 1.0)).log_softmax(-1).numpy()
    expected = logprobs[np.arange(C), result.tokens_C]
    np.testing.assert_allclose(result.logprobs_C[:upto], expected[:upto], rtol=0, atol=1e-5)
    if upto is None and result.routing is not None:
        np.testing.assert_array_equal(np.sort(result.routing, -1), out.experts_NLK[:-1].sort(-1).values.numpy())


@pytest.mark.parametrize(
    "config",
    [
        QWEN3_MOE,
        QWEN3,
        DEEPSEEK,
        LLAMA,
        LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": False},
        QWEN2,
        QWEN2 | {"head_dim": 4, "num_attention_heads": 16},
        QWEN3 | {"num_attention_heads": 6, "tie_word_embeddings": False},
        QWEN3_MOE | {"intermediate_size": 80, "mlp_only_layers": [1], "norm_topk_prob": False},
        QWEN3_MOE | {"head_dim": 4, "num_attention_heads": 16},
    ],
    ids=[
        "qwen3_moe",
        "qwen3",
        "deepseek_v3",
        "llama",
        "llama_odd_heads",
        "qwen2",
        "qwen2_in_torch",
        "three_heads_a_key",
        "one_layer_dense",
        "no_whole_vectors",
    ],
)
def test_log_probabilities_and_routing_equal_the_models_under_any_mix_of_batching_chunking_and_prefix_hits(
    config, engine_of
):
    model = build(config)
    engine = engine_of(model)
    rng = np.random.default_rng(1)
    for _ in range(3):
        turns = ask_a_mix(engine, rng)
        results = [t.result() for t in turns]
        following = []
        for turn, result in zip(turns, results, strict=True):
            check(model, turn, result)
            assert result.finish.type == "length"
            more = np.concatenate([turn.tokens, result.tokens_C, rng.integers(0, 64, int(rng.integers(0, 8)))])
            following.append(Asked(engine, more, 5))
        for turn in following:
            check(model, turn, turn.result())


def test_the_next_turn_computes_only_what_is_new(engine_of):
    model = build()
    engine = engine_of(model)
    first = Asked(engine, np.arange(20), 6)
    a = first.result()
    second = Asked(engine, np.concatenate([first.tokens, a.tokens_C, [1, 2, 3]]), 4)
    b = second.result()
    assert b.cached_tokens == 20 + 6 - 1
    check(model, second, b)


def test_a_group_computes_its_prompt_once(engine_of):
    model = build()
    engine = engine_of(model, prefill_tokens=16)
    before = engine.steps
    asked = [Asked(engine, np.arange(40), 3) for _ in range(8)]
    results = [a.result() for a in asked]
    assert sorted(r.cached_tokens for r in results) == [0] + [39] * 7
    assert engine.steps - before < 15
    for a, r in zip(asked, results, strict=True):
        check(model, a, r)


def test_sessions_of_different_extra_keys_share_nothing(engine_of):
    engine = engine_of(build())
    Asked(engine, np.arange(30), 2, extra_key="1").result()
    assert Asked(engine, np.arange(30), 2, extra_key="2").result().cached_tokens == 0
    assert Asked(engine, np.arange(30), 2, extra_key="1").result().cached_tokens == 29


def test_more_sessions_than_rows_wait_and_the_least_recently_used_go(engine_of):
    model = build()
    engine = engine_of(model, rows=3)
    rng = np.random.default_rng(0)
    asked = [Asked(engine, rng.integers(0, 64, 20), 10) for _ in range(14)]
    for a in asked:
        check(model, a, a.result())
    state = engine.call(engine.state).result()
    assert (state["running"], state["waiting"], state["active_rows"]) == (0, 0, 0)


def test_a_swap_in_mid_generation_keeps_the_cache_and_every_token_knows_its_version(engine_of):
    old, new = build(seed=0), build(seed=1)
    engine = engine_of(old)
    swapped = threading.Event()
    count = 0

    def progress(_token: int, _logprob: float, _serial: int) -> None:
        nonlocal count
        count += 1
        if count == 10:  # on the engine's thread, in the middle of a step: it takes effect before the next
            engine.swap(new, 7).add_done_callback(lambda _: swapped.set())

    asked = Asked(engine, np.arange(20), 30, progress=progress)
    result = asked.result()
    assert swapped.wait(patient(10))
    versions = result.versions_C.tolist()
    assert versions == [0] * 10 + [7] * 20
    assert result.oldest_kv_version == 0
    assert result.weight_version == 7
    check(old, asked, result, upto=10)
    logprobs, routing = mixed(old, new, asked.tokens, result, 10)
    np.testing.assert_allclose(result.logprobs_C[10:], logprobs, atol=1e-5)
    assert result.routing is not None
    np.testing.assert_array_equal(np.sort(result.routing, -1), routing)
    assert not np.array_equal(routing, chosen(new, asked.tokens, result))  # the first rows are the old weights'
    again = Asked(engine, np.concatenate([asked.tokens, result.tokens_C, [1, 2, 3]]), 4)
    next_turn = again.result()
    assert (next_turn.cached_tokens, next_turn.oldest_kv_version) == (20 + 30 - 1, 0)
    assert next_turn.routing is not None
    np.testing.assert_array_equal(next_turn.routing[: len(result.routing)], result.routing)  # rows are written once
    fresh = Asked(engine, np.arange(20), 5, extra_key="7")
    later = fresh.result()
    check(new, fresh, later)
    assert later.cached_tokens == 0
    assert later.oldest_kv_version == 7


def chosen(model: Transformer, prompt: np.ndarray, result: Result) -> np.ndarray:
    """The experts of one plain forward, of every row that an answer has."""
    whole = torch.from_numpy(np.concatenate([prompt, result.tokens_C])).long()
    out = model(whole, torch.arange(len(whole)), causal_rows(1, len(whole)))
    return out.experts_NLK[:-1].sort(-1).values.numpy()


def mixed(
    old: Transformer, new: Transformer, prompt: np.ndarray, result: Result, cut: int
) -> tuple[np.ndarray, np.ndarray]:
    """What a model change without recomputing the cache must give: keys, values and experts of the first tokens by the old
    weights, the rest by the new ones. Log-probabilities from token `cut` on, and the experts of every row."""
    whole = torch.from_numpy(np.concatenate([prompt, result.tokens_C])).long()
    P = len(prompt)
    # Feeding sampled token cut-1 is the first step of the new model: positions before it were computed by the old one.
    boundary = P + cut - 1
    cache: dict[int, list[torch.Tensor]] = {}

    def attend(layer, q, k, v):
        before = cache.get(layer)
        keys, values = (torch.cat([before[0], k]), torch.cat([before[1], v])) if before else (k, v)
        cache[layer] = [keys, values]
        R = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(R, 1), values.repeat_interleave(R, 1)
        scores = torch.einsum("nhd,mhd->hnm", q, keys)
        n, m = scores.shape[1:]
        scores = scores.masked_fill(torch.arange(m) > torch.arange(n)[:, None] + m - n, -torch.inf)
        return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)

    before = old(whole[:boundary], torch.arange(boundary), attend)
    out = new(whole[boundary:], torch.arange(boundary, len(whole)), attend)
    logprobs = new.logits(out.hidden_ND).log_softmax(-1).numpy()
    n = len(result.tokens_C) - cut
    experts = torch.cat([before.experts_NLK, out.experts_NLK[:-1]]).sort(-1).values.numpy()
    return logprobs[np.arange(n), result.tokens_C[cut:]], experts


def test_stop_tokens_end_a_generation_and_are_part_of_it(engine_of):
    engine = engine_of(build())
    result = Asked(engine, np.arange(10), 80, stop_tokens=frozenset(range(0, 64, 2))).result()
    assert result.finish.type == "stop"
    assert result.finish.matched == result.tokens_C[-1]
    assert all(t % 2 for t in result.tokens_C[:-1])


def test_the_context_bounds_a_generation(engine_of):
    model = build()
    engine = engine_of(model)
    asked = Asked(engine, np.arange(60), 1000)
    result = asked.result()
    assert result.finish.type == "length"
    assert len(result.tokens_C) == 96 - 60 + 1
    check(model, asked, result)
    with pytest.raises(ValueError, match=r"97 tokens; allowed: 1\.\.96"):
        Asked(engine, np.zeros(97), 1)


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(engine_of):
    engine = engine_of(build())
    alone = Asked(engine, np.arange(10), 20, seed=5).result()
    crowd = [Asked(engine, np.arange(3, 30), 20) for _ in range(5)]
    beside = Asked(engine, np.arange(10), 20, seed=5).result()
    other = Asked(engine, np.arange(10), 20, seed=6).result()
    [c.result() for c in crowd]
    assert alone.tokens_C.tolist() == beside.tokens_C.tolist() != other.tokens_C.tolist()


def test_abort_frees_the_row_and_returns_what_there_was(engine_of):
    engine = engine_of(build())
    begun, told = threading.Event(), threading.Event()
    asked = Asked(engine, np.arange(10), 80, progress=lambda *_: begun.set() or told.wait(patient(10)))
    assert begun.wait(patient(10))
    engine.abort(asked.request, "test")
    told.set()
    result = asked.result()
    assert result.finish.type == "abort"
    assert 0 < len(result.tokens_C) < 80
    assert engine.call(engine.state).result()["active_rows"] == 0


def test_nothing_is_sampled_while_paused_and_the_cache_survives(engine_of):
    model = build()
    engine = engine_of(model)
    begun = threading.Event()
    asked = Asked(engine, np.arange(10), 60, progress=lambda *_: begun.set())
    assert begun.wait(patient(10))
    engine.pause(abort=False).result()
    steps = engine.call(lambda: engine.steps).result()
    assert engine.call(lambda: engine.steps).result() == steps
    engine.proceed().result()
    check(model, asked, asked.result())


def test_sampling_follows_the_distribution(engine_of):
    model = build()
    engine = engine_of(model, rows=40)
    prompt = np.arange(12)
    asked = [Asked(engine, prompt, 1, temperature=1.5) for _ in range(1000)]
    tokens = np.array([a.result().tokens_C[0] for a in asked])
    out = model(torch.arange(12), torch.arange(12), causal_rows(1, 12))
    expected = (model.logits(out.hidden_ND)[-1] / 1.5).softmax(-1).numpy()
    found = np.bincount(tokens, minlength=64) / len(tokens)
    deviation = np.sqrt(expected * (1 - expected) / len(tokens))
    assert (np.abs(found - expected) <= 5 * deviation + 2e-3).all()


def test_a_step_that_fails_leaves_nobody_waiting_and_the_engine_goes_on(engine_of, monkeypatch):
    model = build()
    engine = engine_of(model)
    begun, told = threading.Event(), threading.Event()
    running = Asked(engine, np.arange(10), 60, progress=lambda *_: begun.set() or told.wait(patient(10)))
    assert begun.wait(patient(10))

    def no_memory(*_):
        raise MemoryError("no room for the logits")

    monkeypatch.setattr(engine.batch, "_sample", no_memory)
    joining = Asked(engine, np.arange(30), 5)
    told.set()
    results = [running.result(), joining.result()]
    assert [r.finish.type for r in results] == ["abort", "abort"]
    assert "the engine failed: MemoryError" in results[0].finish.message
    monkeypatch.undo()
    again = Asked(engine, np.arange(30), 5)
    check(model, again, again.result())


def test_a_model_whose_parameters_are_not_of_its_shape_never_comes_to_sample(engine_of):
    model = build()
    engine = engine_of(model)
    broken = build()
    broken.embed_tokens.weight = torch.nn.Parameter(broken.embed_tokens.weight[:1].detach(), requires_grad=False)
    with pytest.raises(ValueError, match=r"\(32, 1\).*\(32, 64\)"):
        engine.swap(broken, 1)
    asked = Asked(engine, np.arange(30), 5)
    check(model, asked, asked.result())


def test_every_request_to_an_engine_that_stops_is_answered_or_refused(engine_of) -> None:
    engine = engine_of(build())
    asked: list[Asked] = []

    def ask() -> None:
        with contextlib.suppress(Overloaded):
            while True:
                asked.append(Asked(engine, np.arange(5), 4))

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    while len(asked) < 20:
        pass
    engine.stop()
    for thread in asking:
        thread.join(patient(10))
    for one in asked:
        one.result()
    with pytest.raises(Overloaded, match="shutting down"):
        Asked(engine, np.arange(5), 4)
