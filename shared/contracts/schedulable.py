"""What a run must be for the scheduler to take it up; whoever begins one asks the same before it is made. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from shared.contracts import allowed
from shared.contracts.run import RunConfig


def objections(config: RunConfig, old: RunConfig | None = None) -> list[str]:
    """What makes a run configuration impossible to schedule: field, what was found, what is allowed. `old`: what the run has
    now; an objection to that is none to a change of something else. None: the run is new."""
    found = [*allowed.objections(config), *_together(config)]
    known = set(objections(old)) if old else ()
    return [objection for objection in found if objection not in known]


def _together(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong between fields that are each as declared."""
    schedule, train = config.schedule, config.train
    if schedule.group_size < schedule.group_min:
        yield f"schedule.group_min: found {schedule.group_min}; allowed: 2 to group_size ({schedule.group_size})"
    if train.importance_floor > 0 and train.importance_clip < 1:
        yield (
            f"train.importance_clip: found {train.importance_clip}; allowed: 1 or more beside an importance_floor above 0, since "
            "tokens that trainer and sampler agree on weigh 1"
        )
