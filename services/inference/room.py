"""How much memory a cache takes, and how much there is."""

from __future__ import annotations

import sys

import torch

from shared import memory
from shared.model import ModelConfig


def cache_bytes(config: ModelConfig, rows: int, positions: int, *, mtp: bool, bytes_each: int) -> int:
    """Keys and values, as `cache.SlotCache` lays them out; what lies beside them is small."""
    layers = config.num_hidden_layers + (mtp and config.num_mtp_layers > 0)
    numbers = layers * config.num_key_value_heads * (config.head_dim + config.v_head_dim)
    return numbers * rows * positions * bytes_each


def free_bytes(device: str) -> int:
    """Of the device; for a CPU of the machine, or of the container that this runs in where that has less."""
    if device == "cpu":
        free = memory.free_bytes()
        return sys.maxsize if free is None else free  # where nobody says, nothing is held against a cache
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for what comes next
    return torch.cuda.mem_get_info(device)[0] + kept
