"""`etude reconfigure`: changes a run that goes on (what of it: `shared.contracts.reconfiguring`).

Invariants
- A configuration is stored under its own checksum, before the word that names it, beside those before it: nothing of a run is
  overwritten.
- It returns when the scheduler has said that the new configuration holds, or why not.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import xxhash

from etude.acting import Refused, Say, anew, answered, author, chosen, require_listeners, shortened, tell, too_late
from etude.demo import changes
from etude.standing import HEARD, Listener, Standing
from shared import bus as buses
from shared import objects as stores
from shared.contracts import reconfiguring
from shared.contracts.life import RunState
from shared.contracts.messages import Alert, RunCommand
from shared.contracts.reconfiguring import differing, fields
from shared.contracts.run import Ref, RunConfig
from shared.contracts.topics import ALERTS
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.settings import ServiceSettings

ALERT_WITHIN_S = 5.0  # the scheduler publishes the alert with its answer, on another topic


def objection(old: RunConfig, new: RunConfig) -> str:
    """As the scheduler's; and what changes nothing is none."""
    return reconfiguring.objection(old, new) if differing(old, new) else "nothing of it differs from what the run has"


async def reconfigure(settings: ServiceSettings, run: str, file: Path, say: Say, *, reason: str = "") -> None:
    """Raises Refused, BadChange, BusUnavailable."""
    wanted = changes.read(file)
    require_listeners(settings)
    bus, objects = buses.connect(settings.bus_url, client="etude-runs"), stores.connect(settings.objects_url)
    try:
        async with Listener(bus, (*HEARD, ALERTS)) as listener:
            standing = chosen(listener.standings, run)
            if standing.state is RunState.finished:
                raise Refused(f"{standing.run} is finished. {anew(standing.run)}")
            if standing.state is RunState.stopping:
                raise Refused(
                    f"{standing.run} is stopping, whatever its configuration: `etude resume {standing.run}` first"
                )
            old = _read(objects, standing.configs[-1])
            new = changes.apply(old, wanted, file)
            if why := objection(old, new):
                raise Refused(f"--config {file}: {why}")
            data = msgspec.json.encode(new)
            try:
                config = objects.put(f"runs/{standing.run}/config-{xxhash.xxh3_128_hexdigest(data)[:12]}.json", data)
            except OSError as error:
                raise Refused(f"the new configuration cannot be stored, and nothing was said: {error}") from None
            word = RunCommand(
                run=standing.run,
                action="reconfigure",
                config=config,
                reason=shortened(reason),
                by=author("etude reconfigure"),
            )
            await tell(bus, word)
            await _taken(listener, standing, word, settings)
            before, now = fields(old), fields(new)
            told = (f"{name} {_shown(before.get(name))} -> {_shown(now.get(name))}" for name in differing(old, new))
            say(f"{standing.run} is {standing.state}, and goes on with {', '.join(told)}.")
    finally:
        await bus.close()


def _read(objects: Objects, ref: Ref) -> RunConfig:
    try:
        return msgspec.json.decode(objects.get(ref), type=RunConfig)
    except (OSError, ObjectMissing, ObjectDamaged) as error:
        raise Refused(f"what the run is configured with cannot be read: {ref.key}: {error}") from None


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


async def _taken(listener: Listener, run: Standing, command: RunCommand, settings: ServiceSettings) -> None:
    """Wait until the scheduler has answered. Raises Refused unless its configuration holds then."""
    config = command.config
    assert config is not None

    def refused() -> Alert | None:
        said = (new for new in listener.said if isinstance(new, Alert) and new.run == run.run)
        return next((new for new in said if new.name == "configuration" and config.key in new.what), None)

    status = await answered(listener, command, settings)
    if status.configs[-1:] != [config]:
        await listener.until(lambda: refused() is not None, ALERT_WITHIN_S)
        if (alert := refused()) is None:
            raise too_late(command, run)
        raise Refused(f"{run.run} goes on as it was. {alert.what}: {'; '.join(alert.examples)}")
    if run.configs[-1:] != [config]:
        raise Refused(
            f"{run.run}: somebody reconfigured it at the same time, and {run.configs[-1].key} holds; say it again"
        )
