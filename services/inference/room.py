"""How much memory a cache takes, and how much there is."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from shared.model import ModelConfig

CGROUP = Path("/sys/fs/cgroup")  # a container's own


def cache_bytes(config: ModelConfig, rows: int, positions: int, *, mtp: bool, bytes_each: int) -> int:
    """Keys and values, as `cache.SlotCache` lays them out; what lies beside them is small."""
    layers = config.num_hidden_layers + (mtp and config.num_mtp_layers > 0)
    numbers = layers * config.num_key_value_heads * (config.head_dim + config.v_head_dim)
    return numbers * rows * positions * bytes_each


def free_bytes(device: str, cgroup: Path = CGROUP) -> int:
    """Of the device; for a CPU of the machine, or of the container that this runs in where that has less."""
    if device != "cpu":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for what comes next
        return torch.cuda.mem_get_info(device)[0] + kept
    free = psutil.virtual_memory().available
    try:
        most, holds = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        files = int(parts["inactive_file"]) + int(parts["active_file"])  # a cache that gives way
    except (OSError, ValueError, KeyError):  # no cgroups of version 2; "max" is no number
        return free
    return min(free, max(0, most - holds + files))
