"""Groups in hand: announced, being fetched, ready to train. One per run; the order is that of arrival."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog

from services.trainer.groups import LoadedGroup, Untrainable
from shared.contracts.messages import GroupReady

log = structlog.get_logger()
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 30.0


class Hand:
    """The first `ahead` groups are fetched at once, while the step before still trains; the others wait as the announcements that
    they are: a group in hand is all its routing in memory. `changed` is set whenever something arrived."""

    def __init__(
        self,
        load: Callable[[GroupReady], LoadedGroup],
        untrainable: Callable[[GroupReady, str], Awaitable[None]],
        *,
        fetches: int,
        ahead: int,
    ) -> None:
        self._load, self._untrainable, self._ahead = load, untrainable, ahead
        self._slots = asyncio.Semaphore(fetches)
        self._waiting: dict[str, GroupReady] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._groups: dict[str, LoadedGroup | None] = {}  # None: on its way
        self._taken: frozenset[str] = frozenset()  # by the last `take`
        self.changed = asyncio.Event()

    def __contains__(self, group: str) -> bool:
        """Whether the group waits, is here, or trains in the step under way. To announce it again then adds nothing."""
        return group in self._groups or group in self._waiting or group in self._taken

    def __len__(self) -> int:
        """Groups that are here."""
        return sum(group is not None for group in self._groups.values())

    def add(self, ready: GroupReady) -> None:
        self._waiting[ready.group] = ready
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._groups) < self._ahead:
            group = next(iter(self._waiting))
            self._groups[group] = None
            self._tasks[group] = asyncio.create_task(self._fetch(self._waiting.pop(group)))

    async def _fetch(self, ready: GroupReady) -> None:
        """Tries until the store answers; what the store says about the group is final."""
        delay = FIRST_DELAY_S
        try:
            while True:
                try:
                    async with self._slots:
                        self._groups[ready.group] = await asyncio.to_thread(self._load, ready)
                    return
                except Untrainable as error:
                    reason = str(error)
                    break
                except OSError as error:
                    log.warning("fetch_failed", run=ready.run, group=ready.group, reason=str(error), retry_s=delay)
                    await asyncio.sleep(delay * random.uniform(0.5, 1.5))
                    delay = min(2 * delay, LAST_DELAY_S)
                except Exception as error:  # a bug of ours must not hide as a group that never comes
                    log.exception("group_unreadable", run=ready.run, group=ready.group)
                    reason = f"{type(error).__name__}: {error}"
                    break
            await self._untrainable(ready, reason)
        finally:
            if self._groups.get(ready.group) is None:  # whatever became of the word: it must not hold up those after it
                self._groups.pop(ready.group, None)
            self._tasks.pop(ready.group, None)
            self._fill()
            self.changed.set()

    def take(self, count: int) -> list[LoadedGroup] | None:
        """The first `count` groups, or None while the first `count` are not all here: order is kept, so that what is
        trained does not depend on which fetch was faster.

        Whoever calls it has ended the step before: the groups of that step are known by what became of them, not by this hand.
        """
        self._taken = frozenset()
        names = list(self._groups)[:count]
        groups = [self._groups[name] for name in names]
        if len(names) < count or any(group is None for group in groups):
            return None
        for name in names:
            del self._groups[name]
        self._taken = frozenset(names)
        self._fill()
        return [group for group in groups if group is not None]

    def close(self) -> None:
        self._waiting.clear()
        for task in self._tasks.values():
            task.cancel()
