"""Who waits for this replica to serve exactly one version, and what it follows where that cannot be had."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.inference.following import Following
from services.inference.run_store import RunStore
from services.inference.wire import BadRequest, Unavailable


@dataclass(slots=True)
class Pins:
    """A pin is of a version of one run, and holds until it is let go or another takes its place. One that cannot be served is
    none: what held before holds again. Every one that waits is answered."""

    following: Following
    store: RunStore
    _held: tuple[int | None, str] = field(init=False)  # what holds where a pin that waits is refused
    _settings: tuple[int | None, str] = field(init=False)
    _waiting: list[tuple[str, int, asyncio.Future[None]]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._held = self._settings = self.following.pinned, self.following.pinned_run

    async def ask(self, run: str, serial: int) -> asyncio.Future[None] | None:
        """Done when this version is served; BadRequest where another pin took its place, or what `refuse` is given. None: serial
        is -1, and from here on the settings hold. Raises BadRequest, Unavailable."""
        if serial < -1:
            raise BadRequest(f"serial: found {serial}; allowed: a published version, or -1 for what the settings say")
        if serial == -1:
            self._held = self._settings
            self.following.pinned, self.following.pinned_run = self._settings
            return None
        if not run:
            raise BadRequest("serial: no run is served yet")
        try:
            there = serial == 0 or await asyncio.to_thread(self.store.manifest, run, serial) is not None
        except OSError as error:
            raise Unavailable(f"the object store does not answer: {error}") from None
        if not there:
            raise BadRequest(f"serial: found {serial}; run {run} has published no such version")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((run, serial, done))
        self.following.pinned, self.following.pinned_run = serial, run
        return done

    def settle(self, run: str, serial: int) -> None:
        """Answers those whose version is served now, and those whose pin holds no more."""
        now = self.following.pinned, self.following.pinned_run
        for pinned_run, pinned, done in self._waiting:
            if done.done():
                continue
            if (pinned_run, pinned) == (run, serial):
                self._held = pinned, pinned_run
                done.set_result(None)
            elif now != (pinned, pinned_run):
                other = "-1" if now[0] is None else f"{now[0]}"
                done.set_exception(BadRequest(f"serial: {pinned} was replaced by {other}"))
        self._waiting = [waiting for waiting in self._waiting if not waiting[-1].done()]

    def refuse(self, error: Exception) -> bool:
        """The pin that somebody waits for cannot be served: tells them. False: nobody waits, and it goes on to hold."""
        now = self.following.pinned, self.following.pinned_run
        waits = [done for run, serial, done in self._waiting if (serial, run) == now and not done.done()]
        if not waits:
            return False
        self.following.pinned, self.following.pinned_run = self._held
        for done in waits:
            done.set_exception(error)
        return True
