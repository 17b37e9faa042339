"""Objects of a version on their way: several at a time, given out in their order. What is checked of each, the store checks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.weights.manifest import ChainBroken, Manifest, WeightsDamaged

FETCHERS = 8  # one connection seldom fills a network; more would only take it from who samples on the same machine
AHEAD_BYTES = 1 << 30  # of payloads that lie in memory before their turn


@contextmanager
def fetchers() -> Iterator[ThreadPoolExecutor]:
    """Who leaves early leaves nothing behind that was not begun."""
    pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="fetch")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def payloads(objects: Objects, versions: Sequence[Manifest], pool: ThreadPoolExecutor) -> Iterator[list[bytes]]:
    """All parts of each version, in the order given; what comes next is fetched meanwhile. Raises ChainBroken or WeightsDamaged at
    the version that it is of."""
    waiting, coming = deque(versions), deque[tuple[Manifest, list[Future[bytes]]]]()
    ahead = 0
    while waiting or coming:
        while waiting and (not coming or ahead + waiting[0].payload_bytes <= AHEAD_BYTES):
            manifest = waiting.popleft()
            ahead += manifest.payload_bytes
            coming.append((manifest, [pool.submit(objects.get, part) for part in manifest.parts]))
        manifest, parts = coming.popleft()
        ahead -= manifest.payload_bytes
        try:
            payload = [part.result() for part in parts]
        except ObjectMissing as error:
            raise ChainBroken(f"serial {manifest.serial}: payload {error} is missing") from None
        except ObjectDamaged as error:
            raise WeightsDamaged(f"serial {manifest.serial}: payload: {error}") from None
        yield payload
