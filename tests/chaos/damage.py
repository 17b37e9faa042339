"""A published version whose objects are damaged or lost for good, while engines follow the run."""

from __future__ import annotations

import asyncio
import re
import time

from shared import bus as buses
from shared import objects as stores
from shared.contracts import topics
from shared.contracts.ids import policy_prefix
from shared.contracts.messages import Alert, PolicyPublished
from shared.objects import ObjectMissing, Objects
from tests.chaos.platform import NotInTime, Platform, until
from tests.chaos.strikes import Outcome
from tests.patience import patient

BACK_WITHIN_S = 60.0  # measured on two busy cores: 5 to 9 s, the full base after 2
LOOK_S = 0.005  # engines read a version within a second of its publication


class _Heard:
    """Versions that were published, and alerts that were raised, since the strike began."""

    def __init__(self, platform: Platform) -> None:
        self.published: list[PolicyPublished] = []
        self.alerts: list[Alert] = []
        self._bus = buses.connect(platform.settings.bus_url, client="chaos")
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        heard = [topics.POLICIES_PUBLISHED, topics.ALERTS]
        async for delivery in self._bus.deliveries(heard, group=None, max_in_flight=256):
            message = delivery.message
            if isinstance(message, Alert):
                self.alerts.append(message)
            else:
                self.published.append(message)
            delivery.done()

    def base_after(self, serial: int) -> bool:
        return any(one.serial > serial and one.parent < 0 for one in self.published)

    def rung(self, serial: int) -> bool:
        """About this version, or one that was published on it before an engine had reported."""
        named = (re.match(r"version (\d+) ", one.what) for one in self.alerts if one.name == "version_damaged")
        return any(match and int(match[1]) >= serial for match in named)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._bus.close()


async def damage(platform: Platform, how: str) -> Outcome:
    """The next delta is flipped in one bit, or deleted, before an engine has read it. Well again when a full base was published
    in its place, an alert said why, and groups are trained again."""
    outcome, heard = Outcome(how, "delta"), _Heard(platform)
    objects = stores.connect(platform.settings.objects_url)
    try:
        serial = await asyncio.to_thread(_spoil_next, objects, platform.run, how)
        began = time.monotonic()
        outcome.notes["version"] = str(serial)
        await until(lambda: heard.rung(serial), f"an alert about version {serial}", BACK_WITHIN_S)
        await until(lambda: heard.base_after(serial), f"a full base after version {serial}", BACK_WITHIN_S)
        outcome.notes["base after, s"] = f"{time.monotonic() - began:.1f}"
        await platform.advances(platform.trained, 5, "training after a version was damaged", BACK_WITHIN_S)
        outcome.recovery_s = time.monotonic() - began
    except NotInTime as error:
        waits = {name: platform.waits(name) for name in ("inference", "scheduler", "trainer")}
        outcome.failed = f"{error}; {waits}"
    finally:
        await heard.close()
    return outcome


def _spoil_next(objects: Objects, run: str, how: str) -> int:
    """Return the serial of the delta that was spoilt. Blocking."""
    known = _payloads(objects, run).keys()
    deadline = time.monotonic() + patient(BACK_WITHIN_S)
    while time.monotonic() < deadline:
        for serial, key in _payloads(objects, run).items():
            if serial in known or not _is_delta(objects, run, serial):
                continue
            data = objects.get(objects.head(key))
            objects.delete(key)
            if how == "flipped":
                middle = len(data) // 2
                objects.put(key, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
            return serial
        time.sleep(LOOK_S)
    raise NotInTime(f"waited {BACK_WITHIN_S:.0f} s for a delta")


def _payloads(objects: Objects, run: str) -> dict[int, str]:
    """The first part of every version, by serial."""
    keys = sorted(objects.list(f"runs/{run}/policies/"), reverse=True)
    found = ((re.search(r"/policies/(\d+)/[^/]+\.bin$", key), key) for key in keys)
    return {int(match[1]): key for match, key in found if match}


def _is_delta(objects: Objects, run: str, serial: int) -> bool:
    """False also while its manifest is not there yet."""
    try:
        manifest = objects.get(objects.head(f"{policy_prefix(run, serial)}/manifest.json"))
    except ObjectMissing:
        return False
    return b'"parent":-1' not in manifest
