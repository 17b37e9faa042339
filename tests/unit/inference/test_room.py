"""How much memory a cache takes, and how much there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.inference.cache import SlotCache
from services.inference.room import cache_bytes, free_bytes
from shared.model import ModelConfig
from tests.unit.inference.test_sglang_weights import KINDS

MIB = 2**20


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("mtp", [False, True])
def test_a_cache_takes_what_was_reckoned_before_it_was_made(kind, mtp):
    config = ModelConfig.from_dict(KINDS[kind])
    cache = SlotCache(config, rows=3, positions=40, mtp=mtp and config.num_mtp_layers > 0)
    assert cache_bytes(config, 3, 40, mtp=mtp, bytes_each=4) == cache.keys.nbytes + cache.values.nbytes


def test_in_a_container_there_is_what_its_limit_leaves_and_files_that_are_cached_give_way(tmp_path: Path) -> None:
    whole = free_bytes("cpu", tmp_path)  # no limit is said
    assert whole > 40 * MIB
    (tmp_path / "memory.current").write_text(f"{90 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {50 * MIB}\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\n")
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    assert free_bytes("cpu", tmp_path) == 40 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes("cpu", tmp_path) > 40 * MIB
