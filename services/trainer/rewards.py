"""Length penalties of a run's reward configurations, by id, as runs.state announces them.

The trainer needs them with credit by turn: it charges each turn its own share of the penalty. A group names the configuration
that its members were scored under, which in mid-run may be another than the one that the run was started with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from shared.contracts.run import LengthPenalty, Ref, RewardConfig, RunConfig
from shared.objects import ObjectDamaged, ObjectMissing, Objects

PATIENCE_S = 60.0  # its announcement may still be on its way


class UnknownReward(ValueError):
    """No configuration that was announced has this reward; the text says which has been looked for."""


class NotAnnounced(OSError):
    """As UnknownReward, but it may still come: try again."""


class Rewards:
    """Used by one run. `announced`: returns its configurations, the newest last. Each is read once."""

    def __init__(self, objects: Objects, announced: Callable[[], Sequence[Ref]]) -> None:
        self._objects, self._announced = objects, announced
        self._read: dict[str, RewardConfig | None] = {}  # by checksum; None: it cannot be read
        self._missed: dict[str, float] = {}  # id -> when it was not found for the first time

    def length(self, reward_config: str) -> LengthPenalty | None:
        """Return the length penalty of a reward configuration; None: it has none. The empty id, of an announcement that does not
        say, has none to charge by. Raises NotAnnounced, after PATIENCE_S UnknownReward, and what the store raises."""
        if not reward_config:
            return None
        announced = self._announced()
        for ref in reversed(announced):  # as the reward service: should two share an id, the latest counts
            found = self._of(ref)
            if found is not None and found.id == reward_config:
                return found.length
        now = time.monotonic()
        late = now - self._missed.setdefault(reward_config, now) > PATIENCE_S
        raise (UnknownReward if late else NotAnnounced)(
            f"reward configuration {reward_config!r} is in none of the {len(announced)} configurations announced for the run"
        )

    def _of(self, ref: Ref) -> RewardConfig | None:
        if ref.checksum not in self._read:
            try:
                self._read[ref.checksum] = msgspec.json.decode(self._objects.get(ref), type=RunConfig).reward
            except (ObjectMissing, ObjectDamaged, msgspec.MsgspecError):
                self._read[ref.checksum] = None
        return self._read[ref.checksum]
