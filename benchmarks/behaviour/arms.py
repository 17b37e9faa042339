"""The arms of the experiments: what each changes of the demo's configuration."""

from __future__ import annotations

from typing import Any

from benchmarks.behaviour import term
from benchmarks.behaviour.runs import Arm

FIRST = "plain"  # the reward configuration that the runs begin with
WEIGHT = -1.0  # of the term, for an attempt: as much as a solved one earns

# All arms: problems are drawn alike, so two runs of one seed see the same ones in the same order. The learning rates do not fall,
# because the change comes in mid-run. No other behaviour term counts, and the new one counts for failed attempts too.
SCHEDULE: dict[str, Any] = {"hardness_sampling": False}
TRAIN: dict[str, Any] = {"cooldown": 0.0}
REWARD: dict[str, Any] = {
    "id": FIRST,
    "behaviour": {"broken_tool_call": 0.0, "no_submit": 0.0},
    "behaviour_apply": "all",
}


def _arm(name: str, later: dict[str, Any] | None = None, **reward: Any) -> Arm:
    return Arm(name, {"schedule": SCHEDULE, "train": TRAIN, "reward": {**REWARD, **reward}}, later)


# The length penalty is the demo's own: weight 0.05, of solved attempts.
CONTROL = _arm("control")
TERM = _arm("term", {"reward": {"id": f"with-{term.NAME}", "behaviour": {term.NAME: WEIGHT}}})
NO_LENGTH = _arm("no-length", length=None)
# Ten times the weight, and failed attempts pay too: nine tenths of all sampled tokens are theirs.
HEAVY = _arm("heavy", length={"weight": 0.5, "apply": "all"})
