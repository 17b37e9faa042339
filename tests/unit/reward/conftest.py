"""Small trajectories for tests of the reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.contracts.messages import AttemptKey, Effort, StopReason
from shared.contracts.trajectory import Segment, Span, Trajectory

KEY = AttemptKey(attempt="a-1", epoch=0, group="g-1", problem="p-1")


def segment(calls: Sequence[tuple[str, bool]]) -> Segment:
    """Two prompt tokens, then two per call (tool, ok); `submit` is the final message."""
    T = 2 + 2 * len(calls)
    mask = np.arange(T) >= 2
    spans = [Span(start=0, end=2, role="prompt")]
    for i, (tool, ok) in enumerate(calls):
        role = "final" if tool == "submit" else "tool_call"
        spans.append(Span(start=2 + 2 * i, end=4 + 2 * i, role=role, turn=i + 1, tool=tool, ok=ok))
    return Segment(
        tokens=np.arange(T, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        oldest_kv_version=3,
        spans=spans,
    )


def make(*calls: str | tuple[str, bool], stop: StopReason = StopReason.submitted, **fields: Any) -> Trajectory:
    pairs = [(call, True) if isinstance(call, str) else call for call in calls]
    broken = sum(not ok for _, ok in pairs)
    defaults: dict[str, Any] = {
        "key": KEY,
        "temperature": 1.0,
        "effort": Effort(tool_calls=len(pairs), broken_tool_calls=broken, tool_call_tokens=2 * len(pairs)),
        "files": {"main.py": "def f(x):\n    return x\n"},
    }
    return Trajectory(stop=stop, **{"segments": [segment(pairs)], **defaults, **fields})


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """trajectory("edit", ("test", False), "submit", stop=…, files=…)"""
    return make


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of a run with four scored attempts."""
    from tests.unit.reward.recorded import recorded

    return recorded(tmp_path)
