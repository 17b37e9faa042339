"""Redis behind an address that follows its primary: after a fail-over, connections made before lead to a replica."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from celery import Celery
from kombu.exceptions import OperationalError
from redis import Redis

from etude import reach
from infra.servers import fleet, state
from services.reward.jobs import QUEUE, celery_app
from tests.address import Address
from tests.patience import patient, until
from tests.servers import need


class World:
    """Two Redis, and the address of the first. `url`: by the address; `first`, `second`: clients of each."""

    def __init__(self, folder: Path) -> None:
        found = []
        for name in ("first", "second"):
            fleet.up(["redis"], folder / name)
            found.append(Redis.from_url(state.settings(folder / name)["ETUDE_JOBS"]))
        self.first, self.second = found
        self._ports = [one.connection_pool.connection_kwargs["port"] for one in found]
        password = self.first.connection_pool.connection_kwargs["password"]
        self.second.config_set("requirepass", password)
        self.second = Redis(port=self._ports[1], password=password)
        self.address = Address(self._ports[0])
        self.url = f"redis://:{password}@127.0.0.1:{self.address.url_port}/0"

    def fail_over(self) -> None:
        """The second becomes the primary; the first lives on as a replica."""
        self.address.port = self._ports[1]
        self.first.replicaof("127.0.0.1", self._ports[1])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    need("ETUDE_JOBS")  # its program is here
    try:
        world = World(tmp_path)
        yield world
        world.address.close()
    finally:
        for name in ("first", "second"):
            fleet.down(tmp_path / name)


def send(app: Celery, number: int) -> None:
    """As services.reward.graders sends a job."""
    app.send_task("etude.nothing", args=[number], queue=QUEUE, retry=False)


def test_a_sender_writes_to_the_new_primary_with_its_second_try_at_the_latest(world: World) -> None:
    with celery_app(world.url) as app:
        send(app, 0)
        assert world.first.llen(QUEUE) == 1
        world.fail_over()
        with pytest.raises(OperationalError):  # a job is never said to be sent that was not
            send(app, 1)
        send(app, 2)
        assert world.second.llen(QUEUE) == 1


def test_who_waits_for_a_job_waits_at_the_new_primary_with_its_second_try_at_the_latest(world: World) -> None:
    with celery_app(world.url) as app, app.connection() as connection, ThreadPoolExecutor(1) as thread:
        queue = connection.SimpleQueue(QUEUE)
        waiting = thread.submit(queue.get, timeout=patient(60))
        until(lambda: world.first.info("clients")["blocked_clients"] == 1, "it to wait")
        world.fail_over()
        with pytest.raises(connection.connection_errors):
            waiting.result(patient(60))
        with celery_app(world.url) as other:
            send(other, 7)
        again = connection.clone()
        assert again.SimpleQueue(QUEUE).get(timeout=patient(60)).payload[0] == [7]
        again.release()


def test_the_doctor_refuses_a_replica(world: World) -> None:
    assert reach._jobs(world.url) == "Redis"
    world.first.replicaof("127.0.0.1", world._ports[1])
    with pytest.raises(ConnectionError, match="is a replica and refuses every job"):
        reach._jobs(world.url)
