"""The project's own engine tells a worker what it samples while it samples, with log-probabilities and versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.rollout import engine_client
from services.rollout.engine_client import EngineClient, Request
from services.rollout.generation import Generation, RoutingShape
from tests.integration.engine_platform import CONFIG, Platform, run


def test_what_a_replica_tells_is_how_its_answer_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "TOLD_EVERY_S", 0.001)

    async def test(p: Platform) -> None:
        p.write_version(0, None)
        await p.start_run()
        async with p.replica() as replica, EngineClient(probe_s=1.0) as client:
            await p.applied(0)
            pieces: list[Generation] = []
            request = Request("a.0-1", [1, 2, 3], 1.0, 50, (), None, 0)
            whole = await client.generate(replica.health.url, request, RoutingShape.of(CONFIG), heard=pieces.append)
            assert (len(whole.tokens), whole.finish) == (50, "length")
            assert pieces
            told = pieces[0]
            for piece in pieces[1:]:
                told = told.then(piece)
            n = len(told.tokens)
            assert told.tokens == whole.tokens[:n]
            np.testing.assert_array_equal(told.logprobs_N, whole.logprobs_N[:n])
            np.testing.assert_array_equal(told.versions_N, whole.versions_N[:n])
            assert (told.cache_key, told.oldest_kv_version) == (whole.cache_key, whole.oldest_kv_version)

    run(test, tmp_path)
