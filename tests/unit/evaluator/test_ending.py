"""The evaluator ends when it is told to, whatever comes in at that moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.evaluator.config import EvaluatorSettings
from services.evaluator.service import Evaluator
from tests.patience import patient


@pytest.mark.parametrize("ticks", range(6))
def test_a_cancellation_that_meets_news_is_not_forgotten(ticks: int, tmp_path) -> None:
    nothing: Any = None

    async def scenario() -> None:
        evaluator = Evaluator(EvaluatorSettings(state=tmp_path), nothing, nothing)
        evaluator.running["run", "eval"] = nothing  # with an evaluation open it waits for so long and no longer
        driving = asyncio.create_task(evaluator.drive())
        await asyncio.sleep(0.01)
        evaluator._news.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        driving.cancel()
        done, _ = await asyncio.wait([driving], timeout=patient(5))
        assert done
        assert driving.cancelled()

    asyncio.run(scenario())
