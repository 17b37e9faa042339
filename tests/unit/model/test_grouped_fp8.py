"""The experts' Triton kernel: by Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patience import patient

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_the_kernel_computes_what_the_emulation_computes_and_so_do_its_gradients(device: str) -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("grouped_fp8_compared.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(script.parents[3]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), device],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(250),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]
