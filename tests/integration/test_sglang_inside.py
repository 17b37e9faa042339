"""What was read from SGLang's source, asked of SGLang itself: its parser and its kernels, without a server."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

from services.inference.config import InferenceSettings
from services.inference.sglang import hashes
from services.inference.sglang.flags import launch
from shared.model import ModelConfig
from tests.sglang import KINDS, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def inside(script: str, *arguments: str, **variables: str) -> str:
    """What a script prints in SGLang's environment."""
    done = subprocess.run(
        [interpreter(), "-c", script, *arguments],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": "", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_sglangs_own_parser_knows_every_argument_that_is_composed(tmp_path):
    lines = []
    for settings in (
        {},
        {"sglang_tp": 2, "sglang_ep": 2, "sglang_dp": 2, "sglang_memory": 0.8, "sglang_running": 8},
        {"sglang_draft_steps": 2, "sglang_deterministic": True, "sglang_attention": "fa3", "sglang_tokens": 9999},
        {"sglang_quantization": "fp8", "sglang_fp8_gemm": "deep_gemm", "sglang_moe_runner": "deep_gemm"},
        {"sglang_device": "cpu", "sglang_dtype": "float32", "sglang_draft_steps": 2, "sglang_chunk": 512},
    ):
        wide = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "moe_intermediate_size": 256}
        model = ModelConfig.from_dict({**KINDS["qwen3_moe"], **wide})
        composed = launch(InferenceSettings(**settings), model, folder="f", port=1, serial=3, context=64, queue_limit=9)
        lines.append(list(composed.arguments[3:]))
    script = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for line in json.loads(sys.argv[1]):
    print(vars(parser.parse_args(line))["weight_version"])
"""
    assert inside(script, json.dumps(lines)).split() == ["3"] * len(lines)


def test_the_hash_on_a_gpu_is_the_one_of_sglangs_kernel(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 1 << 16, 30001).astype(np.uint16)
    path = tmp_path / "numbers.bin"
    numbers.tofile(path)
    script = """
import sys, torch, triton
from sglang.kernels.ops.memory import gpu_tensor_hash as g
words = torch.frombuffer(bytearray(open(sys.argv[1], "rb").read()), dtype=torch.uint8)
words = torch.cat([words, torch.zeros(-len(words) % 4, dtype=torch.uint8)]).view(torch.uint32)
now = torch.empty(triton.cdiv(len(words), 8192), dtype=torch.uint64)
seed = 0x243F6A88
g.hash_tiles32_kernel_blocked[(len(now),)](
    words, now, len(words), seed1=seed, seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF, FM_C1=g.FMIX32_C1,
    FM_C2=g.FMIX32_C2, POS_A=g.POS_C1, POS_B=g.POS_C2, TILE=8192, BLOCK=256, USE_CG=False)
out = torch.empty(1, dtype=torch.uint64)
g.add_tree_reduce_u64_kernel[(1,)](now, out, len(now), CHUNK=1024)
print(f"{g._final_splitmix64(int(out.item())):016x}")
"""
    assert inside(script, str(path), TRITON_INTERPRET="1").strip() == hashes.on_gpu(numbers)
