"""The compiled loops against NumPy and torch, at sizes that leave rests everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.inference.fused import supports
from services.inference.kernels import pointwise
from services.inference.kernels.attention import POSITIONS, two_heads
from services.inference.kernels.matmul import ADD, AT_ONCE_K, AT_ONCE_M, COLUMNS, FAR, ROWS, SET, WHOLE, matmul
from services.inference.kernels.vectors import WIDTH
from services.inference.sampler import propose, sample
from shared.model import ModelConfig, Transformer
from tests.patience import patient
from tests.unit.inference.test_engine_equals_model import QWEN3, QWEN3_MOE

EDGES = [1, 2, 3, 4, 5, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 1, AT_ONCE_M - 1, AT_ONCE_M + ROWS + 1]


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def product(a: np.ndarray, w: np.ndarray, out: np.ndarray, add: int) -> None:
    (M, K), N = a.shape, w.shape[1]
    at = [pointwise.address(x) for x in (a, w, out)]
    matmul(at[0], a.strides[0] // 4, at[1], w.strides[0] // 4, at[2], out.strides[0] // 4, M, K, N, add)


@settings(max_examples=60, deadline=None)
@given(
    M=st.sampled_from(EDGES),
    K=st.sampled_from([1, 7, 128, AT_ONCE_K, AT_ONCE_K + 1]),
    N=st.integers(1, 12).map(lambda n: n * WHOLE),
    add=st.sampled_from([SET, ADD]),
    apart=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**16),
)
def test_products_are_those_of_float64_whatever_the_sizes_and_write_nothing_beside(M, K, N, add, apart, seed):
    a, w = random(seed, M, K + apart)[:, :K], random(seed + 1, K, N + apart)[:, :N]
    whole = random(seed + 2, M + 1, N + apart)
    before = whole.copy()
    product(a, w, whole[:M, :N], add)
    wanted = a.astype(np.float64) @ w.astype(np.float64) + add * before[:M, :N]
    assert np.abs(whole[:M, :N] - wanted).max() <= 1e-6 * (K + 16)
    before[:M, :N] = whole[:M, :N]
    assert np.array_equal(whole, before)


def test_rows_of_several_blocks_share_their_columns():
    for M in range(ROWS + 1, AT_ONCE_M + 1):
        blocks = -(-M // ROWS)
        assert COLUMNS[M // blocks] == COLUMNS[-(-M // blocks)] == WHOLE, M


NARROWER = """
import sys
from llvmlite import binding
features = binding.get_host_cpu_features()
features.update({name: False for name in features if name.startswith("avx512")})
binding.get_host_cpu_features = lambda: features
import pytest
from services.inference.kernels.vectors import WIDTH
assert WIDTH == 8
tests = "tests/unit/inference/"
chosen = "products or near_cache or two_heads or share_their_columns"
sys.exit(pytest.main(["-p", "no:cacheprovider", tests + "test_kernels.py", "-k", chosen]))
"""


def test_the_same_holds_on_a_processor_of_narrower_vectors(tmp_path):
    if WIDTH == 8:
        pytest.skip("this one has no wider ones")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", NARROWER], env=environment, capture_output=True, text=True, timeout=patient(240)
    )
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-2000:]


@pytest.mark.parametrize("M", [1, 4, 5, ROWS, 40])
def test_a_matrix_that_no_near_cache_holds_is_multiplied_alike(M):
    K, N = 300, 1024
    assert 4 * K * N > FAR
    a, w, out = random(1, M, K), random(2, K, N), random(3, M, N)
    product(a, w, out, SET)
    assert np.abs(out - a.astype(np.float64) @ w.astype(np.float64)).max() <= 3e-4


@settings(max_examples=40, deadline=None)
@given(
    n=st.one_of(st.integers(1, 3 * POSITIONS + 1), st.integers(100, 130)),
    Dk=st.sampled_from([WIDTH, 2 * WIDTH, 4 * WIDTH]),
    Dv=st.sampled_from([WIDTH, 2 * WIDTH, 3 * WIDTH]),
    seed=st.integers(0, 2**16),
)
def test_two_heads_attend_as_torch_does(n, Dk, Dv, seed):
    q, keys, values = random(seed, 2, Dk), random(seed + 1, n, Dk), random(seed + 2, n, Dv)
    room, out = np.empty(2 * n, np.float32), np.zeros((2, Dv), np.float32)
    at = pointwise.address
    two_heads(at(q[0]), at(q[1]), at(keys), Dk, at(values), Dv, n, at(room), at(out[0]), at(out[1]))
    exact = [torch.from_numpy(x).double() for x in (q, keys, values)]
    wanted = (exact[0] @ exact[1].T).softmax(-1) @ exact[2]
    assert np.abs(out - wanted.numpy()).max() <= 2e-5


@settings(max_examples=40, deadline=None)
@given(low=st.floats(-200, 0), seed=st.integers(0, 2**16))
def test_exponentials_are_exact_to_float32_and_vanish_far_below(low, seed):
    scores = np.random.default_rng(seed).uniform(low, 0, 37).astype(np.float32)
    best = scores.max()
    wanted = np.exp(scores.astype(np.float64) - best)
    total = pointwise.exponentials(scores, best)
    assert np.abs(scores - wanted).max() <= 2e-7
    assert abs(total - wanted.sum()) <= 1e-5


def test_the_gated_unit_is_torchs_for_every_size_of_gate():
    gate = np.concatenate([np.linspace(-200, 200, 997), [0.0]]).astype(np.float32)
    wide = np.stack([gate, random(1, len(gate))], 1)  # a unit of width 1 per row
    out = np.empty((len(gate), 1), np.float32)
    pointwise.gated(wide, 1, out)
    exact = torch.from_numpy(wide).double()
    wanted = torch.nn.functional.silu(exact[:, :1]) * exact[:, 1:]
    assert torch.allclose(torch.from_numpy(out).double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-40, 1e-31, 1e-9])
def test_what_is_all_but_frozen_is_the_largest_logit_alone(temperature):
    logits = torch.tensor([[-9.0, -3.0, -2.5, -7.0]]).expand(50, 4).contiguous()
    uniforms = np.random.default_rng(1).random(50)
    tokens, logprobs = sample(logits, np.full(50, temperature), uniforms)
    drafts, probabilities = propose(logits, np.full(50, temperature), uniforms)
    assert set(tokens) == set(drafts) == {2}
    assert np.abs(logprobs).max() == 0
    assert np.abs(probabilities[0] - [0, 0, 1, 0]).max() <= 1e-30


@pytest.mark.parametrize(
    ("change", "whole"),
    [({}, True), ({"vocab_size": 72}, False), ({"head_dim": 4}, False), ({"hidden_size": 40}, False)],
    ids=["whole", "vocabulary", "heads", "hidden"],
)
@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE], ids=["dense", "moe"])
def test_sizes_that_fill_no_vector_are_left_to_torch(config, change, whole):
    assert supports(Transformer(ModelConfig.from_dict(config | change)).eval()) is whole
