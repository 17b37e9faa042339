"""`etude promote`: which version the engines of the pool "serving" serve, whatever is trained meanwhile.

Invariants
- Nothing is promoted that was never published, or whose weights are deleted; from then on they are kept.
- With a canary an engine of the evaluation pool goes to the version first, and the others hear of it only where it is measured
  to be no loss beside what is promoted (of the same run; else beside the policy that the run began with).
- It returns when every engine of the pool serves it, or says which does not, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from etude.acting import Refused, author, require_listeners, shortened
from etude.best import deleted, meant
from etude.canary import Trial, tried
from etude.demo.watch import say
from etude.hearing import Hearing, past
from etude.measuring import Known, done
from shared import bus as buses
from shared import objects as stores
from shared.bus import BusUnavailable
from shared.contracts import topics as t
from shared.contracts.messages import SHUTTING_DOWN, PolicyApplied, PolicyPromoted
from shared.settings import ServiceSettings

FOLLOW_WITHIN_S = 120.0  # a large version has to be fetched and rebuilt
START = "ETUDE_POOL=serving python -m services.inference, or docker compose up -d inference-serving"
HEARD = (t.RUNS_STATE, t.POLICIES_PUBLISHED, t.POLICIES_APPLIED, t.POLICIES_PROMOTED)


class Serving:
    """What was said of the pool. `places`: the last word from each address."""

    def __init__(self) -> None:
        self.known = Known()
        self.promoted: PolicyPromoted | None = None
        self.places: dict[str, PolicyApplied] = {}

    def hear(self, message: Any, at: float) -> None:
        self.known.hear(message, at)
        match message:
            case PolicyPromoted():
                self.promoted = message
            case PolicyApplied():
                # One that takes over an address replaces what was there; so does one that changes its pool.
                self.places.pop(message.url, None)
                if message.pool == "serving":
                    self.places[message.url] = message

    def follows(self, url: str, word: PolicyPromoted) -> bool:
        one = self.places.get(url)
        return one is not None and one.ok and (one.run, one.serial) == (word.run, word.serial)

    def failed(self, url: str, word: PolicyPromoted, before: PolicyApplied | None) -> str:
        """Why it cannot serve the version, as it says after `before`; empty: it does not say so."""
        one = self.places.get(url)
        if one is None or one is before or one.ok or (one.run, one.serial) != (word.run, word.serial):
            return ""
        return one.reason


async def promote(
    settings: ServiceSettings, run: str, version: str, reason: str, trial: Trial | None, console: Console
) -> None:
    """Raises Refused, also where the version is too much worse; Stalled, NoVerdict, BusUnavailable."""
    require_listeners(settings)
    run, wanted = await meant(settings, run, version, followed=True)
    objects = stores.connect(settings.objects_url)
    standing, serial, before = await _fitting(settings, run, wanted)
    if deleted(objects, standing, serial):
        raise Refused(f"version {serial} of {standing}: its weights are deleted; no engine can build it")
    if trial is not None:
        beside = before.serial if before is not None and before.run == standing else 0
        if beside != serial:
            otherwise = "Nothing is promoted; without --canary it is"
            reason = await tried(settings, standing, serial, beside, trial, console, reason, otherwise)
    word = PolicyPromoted(run=standing, serial=serial, reason=shortened(reason), by=author("etude promote"))
    await _say_and_wait(settings, word, console)


async def _fitting(settings: ServiceSettings, run: str, version: int) -> tuple[str, int, PolicyPromoted | None]:
    """The run's name (empty: the one started last), the version, and what is promoted now. Raises Refused."""
    serving = Serving()
    await past(settings, HEARD, serving.hear, client="etude-promote")
    standing, serial = serving.known.chosen(run, version)
    return standing.run, serial, serving.promoted


async def _say_and_wait(settings: ServiceSettings, word: PolicyPromoted, console: Console) -> None:
    serving, bus = Serving(), buses.connect(settings.bus_url, client="etude-promote")
    try:
        async with Hearing(bus, HEARD, serving.hear) as hearing:
            # One whose last word is that it cannot is there, too: it tries what is promoted now. One that left is not.
            there = {url: one for url, one in serving.places.items() if one.ok or one.reason != SHUTTING_DOWN}
            try:
                await bus.publish(t.POLICIES_PROMOTED, word.run, word)
            except BusUnavailable as error:
                raise Refused(f"{error}. Whether it was said is not known; to say it again does no harm") from None
            say(console, word.run, f"version {word.serial} is promoted.")
            if not there:
                say(console, word.run, f"Nobody serves it yet; an engine that starts does: {START}")
                return

            def settled() -> bool:
                return all(
                    serving.follows(url, word) or serving.failed(url, word, before) for url, before in there.items()
                )

            await hearing.until(settled, FOLLOW_WITHIN_S)
            _outcome(serving, there, word, console)
    finally:
        await bus.close()


def _outcome(serving: Serving, there: Mapping[str, PolicyApplied], word: PolicyPromoted, console: Console) -> None:
    """Raises Refused where one does not follow."""
    behind = [url for url in sorted(there) if not serving.follows(url, word)]
    if behind:
        why = "; ".join(_excuse(serving, url, word, there[url]) for url in behind)
        raise Refused(
            f"version {word.serial} of {word.run} is promoted, and not served by all within {FOLLOW_WITHIN_S:.0f} s: {why}. They "
            "keep trying; what they serve goes on, but for SGLang that has begun with another run. `etude promote` with an earlier "
            "version goes back"
        )
    names = ", ".join(sorted(serving.places[url].replica for url in there))
    say(console, word.run, f"Served by {names}.")


def _excuse(serving: Serving, url: str, word: PolicyPromoted, before: PolicyApplied) -> str:
    one = serving.places.get(url)
    if one is None:
        return f"{url} serves this pool no more"
    if why := serving.failed(url, word, before):
        return f"{one.replica}: {why}"
    return f"{one.replica}: {_served(one)}, and said nothing since"


def _served(one: PolicyApplied) -> str:
    version = f"version {one.serial} of {one.run}"
    return f"serves {version}" if one.ok else f"does not serve {version}: {one.reason}"


async def tell(settings: ServiceSettings) -> list[str]:
    """What is promoted, by whom and why, and what each engine of the pool serves, in words. Raises BusUnavailable."""
    serving = Serving()
    await past(settings, HEARD, serving.hear, client="etude-promote")
    word = serving.promoted
    why = "; ".join(filter(None, (word.by, word.reason))) if word else ""
    said = [
        f"Version {word.serial} of {word.run} is promoted ({why or 'nobody says why'})."
        if word
        else "Nothing is promoted."
    ]
    for one in serving.places.values():
        said.append(f"{one.replica} {_served(one)}.")
    return said


def run(settings: ServiceSettings, name: str, version: str, reason: str, trial: Trial | None) -> int:
    """Returns the exit code, as `measuring.done`."""
    console = Console(stderr=True)
    return done(promote(settings, name, version, reason, trial, console), console)[1]
