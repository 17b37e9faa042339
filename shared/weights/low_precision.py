"""The formats in which engines hold the large matrices of a policy, and what a published matrix becomes in each.

`fp8`: blocks of 128 x 128 (`blocks`). `mxfp8`, `nvfp4`: blocks along a row (`microscale`). All are made from the published bf16.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import Tensor

from shared.weights.blocks import from_blocks, is_fp8, to_blocks
from shared.weights.manifest import Tensors
from shared.weights.microscale import from_mxfp8, from_nvfp4, to_mxfp8, to_nvfp4
from shared.weights.torch_tensors import from_bits, to_bits

Format = Literal["fp8", "mxfp8", "nvfp4"]


def format_of(setting: bool | str) -> Format | None:
    """Return the format that `train.fp8` or `ETUDE_FP8` names: true is fp8. None: the policy is sampled in bf16."""
    if setting == "mxfp8":
        return "mxfp8"
    if setting == "nvfp4":
        return "nvfp4"
    return "fp8" if setting else None


def round_matrix(weight_NK: Tensor, format: Format) -> Tensor:
    """Return the float32 values that an engine computes with. Those of fp8 and mxfp8 are bf16 numbers, and rounding them again
    changes nothing. Neither holds for nvfp4."""
    if format == "fp8":
        return from_blocks(*to_blocks(weight_NK)).float()
    if format == "mxfp8":
        return from_mxfp8(*to_mxfp8(weight_NK))
    return from_nvfp4(*to_nvfp4(weight_NK))


def in_format(tensors: Tensors, format: Format) -> dict[str, np.ndarray]:
    """Return published tensors as an engine computes with them, rounded to bf16 bits again."""
    return {
        name: to_bits({"": round_matrix(from_bits({"": array})[""], format)})[""] if is_fp8(name, array.ndim) else array
        for name, array in tensors.items()
    }
