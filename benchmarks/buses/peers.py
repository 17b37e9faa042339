"""What others use between their services: a Redis stream with a consumer group, and a ZMQ PUSH/PULL pipe."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from benchmarks.buses import kill, message

PIPELINED = 256
STREAM, GROUP = "bench", "g"


def _payload(size: int) -> bytes:
    import msgspec

    return msgspec.json.encode(message(size))


@contextmanager
def _redis(url: str) -> Iterator[Any]:
    with Redis.from_url(url, socket_timeout=30) as client:
        yield client


def redis_produce(url: str, count: int, size: int) -> float:
    """Messages a second, `PIPELINED` XADD a round trip."""
    payload = _payload(size)
    with _redis(url) as client:
        client.delete(STREAM)
        start = time.perf_counter()
        for first in range(0, count, PIPELINED):
            pipe = client.pipeline(transaction=False)
            for i in range(first, min(count, first + PIPELINED)):
                pipe.xadd(STREAM, {"key": str(i), "data": payload})
            pipe.execute()
        return count / (time.perf_counter() - start)


def redis_consume(url: str, count: int, size: int) -> float:
    """Messages a second from the stream of `redis_produce`, each acknowledged (XACK), acknowledgements pipelined."""
    redis_produce(url, count, size)
    with _redis(url) as client:
        client.xgroup_create(STREAM, GROUP, id="0")
        start, left = time.perf_counter(), count
        while left:
            ((_, entries),) = client.xreadgroup(GROUP, "c", {STREAM: ">"}, count=PIPELINED, block=5000)
            pipe = client.pipeline(transaction=False)
            for name, _ in entries:
                pipe.xack(STREAM, GROUP, name)
            pipe.execute()
            left -= len(entries)
        return count / (time.perf_counter() - start)


def redis_lost_at_kill(folder: Path, url: str, count: int, *, append_only: bool) -> int:
    """Of the messages whose XADD was answered, those that are gone after kill -9 of the server. `append_only` False: as
    Redis comes out of its box (snapshots only)."""
    with _redis(url) as client:
        if not append_only:
            client.config_set("appendonly", "no")
        client.delete(STREAM)
        answered = 0
        for i in range(count):
            client.xadd(STREAM, {"key": str(i)})
            answered += 1
    kill(folder, "redis")
    deadline = time.monotonic() + 30
    while True:
        try:
            with _redis(url) as client:
                return answered - int(client.xlen(STREAM))
        except RedisError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def has_zmq() -> bool:
    return importlib.util.find_spec("zmq") is not None


def _pull(address: str, count: int, answers: Any) -> None:
    import zmq

    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.bind(address)
    answers.put("bound")
    for i in range(count):
        socket.recv()
        if i == 0:
            start = time.perf_counter()
        answers_due = i + 1 == count
        if answers_due:
            answers.put((count - 1) / (time.perf_counter() - start))


def zmq_pipe(address: str, count: int, size: int) -> float:
    """Messages a second through one pipe between two processes; nothing is acknowledged."""
    import zmq

    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    reader = context.Process(target=_pull, args=(address, count, answers))
    reader.start()
    try:
        answers.get(timeout=60)
        socket = zmq.Context.instance().socket(zmq.PUSH)
        socket.connect(address)
        payload = _payload(size)
        for _ in range(count):
            socket.send(payload)
        rate = float(answers.get(timeout=120))
        socket.close(linger=0)
        return rate
    finally:
        reader.kill()
        reader.join()


def _slowly(address: str, seen: Any) -> None:
    import zmq

    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.bind(address)
    while True:
        socket.recv()
        with seen.get_lock():
            seen.value += 1
        time.sleep(0.002)  # work


def zmq_lost_at_kill(address: str, count: int) -> int:
    """Of the messages whose send returned, those that no reader ever worked on: the reader is killed in the middle, and
    another one takes its place."""
    import zmq

    context = multiprocessing.get_context("spawn")
    seen = context.Value("i", 0)
    first = context.Process(target=_slowly, args=(address, seen))
    first.start()
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(address)
    for _ in range(count):
        socket.send(b"x")
    while seen.value < min(50, count // 2):
        time.sleep(0.01)
    os.kill(first.pid or 0, signal.SIGKILL)
    first.join()
    second = context.Process(target=_slowly, args=(address, seen))
    second.start()
    try:
        before, quiet_since = -1, time.monotonic()
        while time.monotonic() - quiet_since < 10:
            if seen.value != before:
                before, quiet_since = seen.value, time.monotonic()
            time.sleep(0.2)
        return count - seen.value
    finally:
        second.kill()
        second.join()
        socket.close(linger=0)
