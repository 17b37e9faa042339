"""What may still change of a run that goes on: what every service takes up in the middle of a run. The trainer holds to what
the run was started with, and no group mixes two kinds of sampling or reward: a new reward has a new id, and holds for new
groups. Pure."""

from __future__ import annotations

import msgspec

from shared.contracts.flat import flat
from shared.contracts.run import RunConfig

BUDGET = ("schedule.max_steps", "schedule.minutes")
FREE = (
    *BUDGET,
    "schedule.group_min",
    "schedule.hardness_sampling",
    "schedule.keep_versions",
    "schedule.lease_s",
    "schedule.pause_on",
    "schedule.quota_gb",
    "schedule.replacements",
    "schedule.share",
)


def fields(config: RunConfig) -> dict[str, str | int | float | bool]:
    """By their dotted names."""
    return flat(msgspec.to_builtins(config))


def differing(old: RunConfig, new: RunConfig) -> list[str]:
    """Dotted names of the fields that are not alike."""
    a, b = fields(old), fields(new)
    return [name for name in a | b if a.get(name) != b.get(name)]


def objection(old: RunConfig, new: RunConfig) -> str:
    """Why a run that was configured as `old` cannot go on as `new`; empty: it can."""
    changed = differing(old, new)
    for name in changed:
        if name.startswith("reward."):
            if old.reward.id == new.reward.id:
                return f"{name}: another reward in mid-run wants a reward.id of its own; found {new.reward.id!r}, which the run has"
        elif name not in FREE:
            return f"{name} is fixed for the life of a run; what may change: {', '.join(FREE)}, reward"
    limited = old.schedule.max_steps or old.schedule.minutes
    if old.train.cooldown and limited and (bound := [name for name in changed if name in BUDGET]):
        return (
            f"{bound[0]}: train.cooldown is {old.train.cooldown:g}: the learning rates fall with the share of the budget that is "
            "spent, and another budget would make them jump"
        )
    return ""
