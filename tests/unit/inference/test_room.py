"""How much memory a cache takes."""

from __future__ import annotations

import pytest

from services.inference.cache import SlotCache
from services.inference.room import cache_bytes
from shared.model import ModelConfig
from tests.unit.inference.test_sglang_weights import KINDS


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("mtp", [False, True])
def test_a_cache_takes_what_was_reckoned_before_it_was_made(kind, mtp):
    config = ModelConfig.from_dict(KINDS[kind])
    cache = SlotCache(config, rows=3, positions=40, mtp=mtp and config.num_mtp_layers > 0)
    assert cache_bytes(config, 3, 40, mtp=mtp, bytes_each=4) == cache.keys.nbytes + cache.values.nbytes
