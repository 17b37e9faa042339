"""The reward that the problem's own environment gave, such as the score of a `verifiers` rubric: any number, where `solved` is a
yes or a no."""

from __future__ import annotations

import msgspec

from shared.terms import Evidence, Found, Seen

NOTE = "environment_reward"  # of a trajectory; the rollout worker writes it (shared.environments.verifiers)


class _Reward(msgspec.Struct):
    reward: float | None = None
    metrics: dict[str, float] = {}


def find(seen: Seen) -> Found:
    """Return the reward, with the rubric's metrics as evidence; nothing where the environment gave none."""
    if (note := seen.trajectory.notes.get(NOTE)) is None:
        return Found()
    found = msgspec.json.decode(note, type=_Reward)
    if found.reward is None:
        return Found()
    return Found(found.reward, [Evidence(f"{name} {value:g}") for name, value in sorted(found.metrics.items())])
