"""`python -m tests.integration.small_server_disk SERVER FOLDER`, in a mount namespace of its own: a real server on a disk
of its own that is filled, and freed again. Exit code 0: a clear error meanwhile, nothing lost that was taken, and it
goes on. A server that gave up (Kafka does) is started again, as its supervisor would.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from infra.servers import fleet, only_what_is_here, state
from services.reward.graders import CeleryJobs
from services.reward.jobs import QUEUE, Job
from shared import bus as buses
from shared import ledger
from shared import objects as stores
from shared.contracts.topics import Topic
from tests.integration.small_disk import Alert, alert, full, said
from tests.patience import eventually, patient

SIZE = "256m"  # a server's own files come first: PostgreSQL's log alone is 80 MiB
TOPIC = Topic("t", (Alert,), partitions=4)
MANY = 4000  # of 50 kB each: more than any server keeps in memory
BACK_WITHIN_S = 90.0
Address = str


async def until_well(work: Callable[[], Awaitable[object]], server: str, folder: Path) -> None:
    """`work` succeeds within BACK_WITHIN_S after there is space again."""
    error: list[Exception] = []

    async def works() -> bool:
        await asyncio.to_thread(fleet.up, [server], folder)
        try:
            await work()
        except Exception as failed:
            error[:] = [failed]
            return False
        return True

    try:
        await eventually(works, f"{server} to work again", BACK_WITHIN_S, every=0.5)
    except TimeoutError as late:
        raise error[0] from late


async def kafka(folder: Path, address: Address) -> None:
    log = buses.connect(address, client="c")
    taken: set[int] = set()
    try:

        async def publish(number: int) -> None:
            await log.publish(TOPIC, str(number), alert(f"{number} {secrets.token_hex(25_000)}"))
            taken.add(number)

        for number in range(20):
            await publish(number)
        with full(folder):
            try:
                for number in range(20, MANY):
                    await publish(number)
            except buses.BusUnavailable as error:
                said("kafka", error)
            else:
                raise AssertionError("a full disk took everything")
        await until_well(lambda: publish(MANY), "kafka", folder)
        seen: set[int] = set()
        deliveries = log.deliveries([TOPIC], "g", 100)
        async with asyncio.timeout(patient(BACK_WITHIN_S)):
            while not taken <= seen:
                delivery = await anext(deliveries)
                seen.add(int(delivery.message.what.split()[0]))
                delivery.done()
    finally:
        await log.close()


async def postgres(folder: Path, address: Address) -> None:
    engine = ledger.connect(address)
    ledger.upgrade(engine)
    insert = text("INSERT INTO lease (name, holder, term, renewals) VALUES (:n, :h, 1, 0)")
    taken: set[str] = set()

    async def write(name: str) -> None:
        with engine.begin() as connection:
            connection.execute(insert, {"n": name, "h": secrets.token_hex(25_000)})
        taken.add(name)

    await write("before")
    with full(folder):
        try:
            for number in range(MANY):
                await write(f"meanwhile {number}")
        except DBAPIError as error:
            said("No space left", error)
        else:
            raise AssertionError("a full disk took everything")
    await until_well(lambda: write("after"), "postgres", folder)
    with engine.connect() as connection:
        names = set(connection.execute(text("SELECT name FROM lease")).scalars())
    assert taken <= names, f"lost: {sorted(taken - names)}"
    engine.dispose()


def _later(store: stores.Objects, error: Exception) -> Exception:
    """A busy MinIO may answer 500 for a moment before it says why."""
    for number in range(5):
        if "disk is full" in str(error):
            break
        try:
            store.put(f"a/later{number}", secrets.token_bytes(1_000_000))
        except stores.ObjectsUnavailable as next_error:
            error = next_error
    return error


async def minio(folder: Path, address: Address) -> None:
    store = stores.connect(address)
    before = store.put("a/before", b"b" * 100_000)
    taken = [before]
    with full(folder):
        try:
            for number in range(MANY):
                taken.append(store.put(f"a/meanwhile{number}", secrets.token_bytes(1_000_000)))
        except stores.ObjectsUnavailable as error:
            said("disk is full", _later(store, error))
        else:
            raise AssertionError("a full disk took everything")
        assert store.get(before) == b"b" * 100_000, "what is there cannot be read from a full disk"

    async def after() -> None:
        taken.append(store.put("a/after", secrets.token_bytes(1_000_000)))

    await until_well(after, "minio", folder)
    assert set(store.list("a/")) == {ref.key for ref in taken}, "half an object is left, or one is lost"
    for ref in taken:
        store.get(ref)  # verifies its checksum


async def redis(folder: Path, address: Address) -> None:
    from redis import Redis

    jobs = CeleryJobs(address)
    taken = 0

    async def send() -> None:
        nonlocal taken
        await jobs.send(Job(answer_key=secrets.token_hex(25_000), items=[]))
        taken += 1

    await send()
    with full(folder):
        try:
            for _ in range(MANY):
                await send()
        except Exception as error:  # whatever the broker's client raises, as in services.reward.graders
            said("No space left", error)
        else:
            raise AssertionError("a full disk took everything")
    await until_well(send, "redis", folder)
    await jobs.close()
    await asyncio.to_thread(fleet.down, folder, keep=True)
    await asyncio.to_thread(fleet.up, ["redis"], folder)
    with Redis.from_url(address) as client:
        assert client.llen(QUEUE) >= taken, "a job that was taken is not there after a restart"


SERVERS = {"kafka": kafka, "postgres": postgres, "minio": minio, "redis": redis}
SETTING = {"kafka": "ETUDE_BUS", "postgres": "ETUDE_LEDGER", "minio": "ETUDE_OBJECTS", "redis": "ETUDE_JOBS"}


def main(server: str, folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(folder)], check=True)
    try:
        with only_what_is_here():
            fleet.up([server], folder)
        settings = state.settings(folder)
        os.environ.update(settings)
        asyncio.run(SERVERS[server](folder, settings[SETTING[server]]))
    finally:
        fleet.down(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
