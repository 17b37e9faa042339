"""Several replicas of one run that come and go while versions are published."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from services.inference.service import Inference
from shared.weights import read_manifest
from tests.integration.engine_platform import Platform, ask, body_of, run
from tests.patience import eventually

REPLICAS, VERSIONS = 3, 12


@contextlib.asynccontextmanager
async def replica(p: Platform, name: str, *, dies: bool = False) -> AsyncIterator[Inference]:
    """Until the block ends; then it leaves, or `dies` wherever it stands and says nothing."""
    inference = Inference(p.settings.model_copy(update={"name": name, "cache_rows": 4}), p.bus, p.objects)
    stop = asyncio.Event()
    async with inference.health:
        running = asyncio.create_task(inference.run(stop))
        try:
            yield inference
        finally:
            if dies:
                running.cancel()
            else:
                stop.set()
            await asyncio.wait({running})
            if not running.cancelled():
                running.result()


async def serial_of(p: Platform, url: str) -> int:
    """What it serves, and that this is, bit for bit, what was published under that serial. -1: nothing yet."""
    status, checked = await ask(url, "/weights_checker", {})
    if status == 503:
        return -1
    assert status == 200, checked
    assert checked["checksum"] == read_manifest(p.objects, p.versions[checked["serial"]].manifest).checksum
    return checked["serial"]


@pytest.mark.parametrize("seed", [1, 2])
def test_replicas_that_come_and_go_while_versions_are_published_serve_what_was_published_and_end_at_the_newest(
    tmp_path, seed
):
    async def test(p: Platform) -> None:
        random_, over, lives, seen = random.Random(seed), asyncio.Event(), [0] * REPLICAS, set[int]()

        async def live(i: int) -> None:
            while not over.is_set():
                lives[i] += 1
                async with replica(p, f"replica-{i}", dies=random_.random() < 0.5) as one:
                    after_s = random_.choice((0.05, 0.3, None))  # in mid-start, in mid-load, or at work
                    if after_s is None:
                        await eventually(lambda one=one: one.health.ready, "a replica to be ready")
                    else:
                        await asyncio.sleep(after_s)
                    newest = -1
                    for _ in range(random_.randrange(5)):
                        serial = await serial_of(p, one.health.url)
                        assert serial >= newest, "a version was taken back"
                        newest = serial
                        status, answer = await ask(one.health.url, "/generate", body_of([1, 2, 3], 4))
                        assert status in (200, 503), answer
                        if status == 200:
                            versions = [int(s["version"]) for s in answer["meta_info"]["weight_versions"]]
                            assert versions[0] >= newest
                            seen.update(versions)

        p.write_version(0, None)
        await p.start_run()
        living = [asyncio.create_task(live(i)) for i in range(REPLICAS)]
        serial = 0
        while serial < VERSIONS or min(lives) < 2 or not seen:
            serial, begun = serial + 1, sum(lives)
            parent = None if serial % 5 == 0 else serial - 1
            p.write_version(serial, parent)
            await p.announce(serial, -1 if parent is None else parent)
            await eventually(lambda begun=begun: sum(lives) > begun, "another life of a replica")
        over.set()
        await asyncio.gather(*living)
        async with contextlib.AsyncExitStack() as stack:
            last = [await stack.enter_async_context(replica(p, f"replica-{i}")) for i in range(REPLICAS)]
            for one in last:
                await eventually(lambda one=one: one.agent._announced == serial)
                assert await serial_of(p, one.health.url) == serial
                assert (await ask(one.health.url, "/generate", body_of([1, 2, 3], 4)))[0] == 200

    run(test, tmp_path)
