"""What a replica's memory does over hours of everything at once: the embedded engine as a process of its own, the shipped base
policy, and at the same time

- short and long requests, whole and streamed, with routing;
- a new version every few seconds, as a delta, a full base now and then;
- clients that leave in mid-stream, that never read, and that send a request byte by byte;
- bodies that are no JSON, or ask for what is not served.

Every row of the cache is filled to its end first: its memory is taken page by page. `soak.rss_growth`: how much more the process
holds at the end than after ten minutes (or a quarter of the time, if that is sooner), in percent. The run fails where an answer is
none that was meant, the newest version does not serve in the end, a row is not free once nobody asks, or the growth is above 5 %.

python -m benchmarks.soak [--minutes 120] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import psutil

from benchmarks.policies import BASE, start
from benchmarks.records import Bench, record
from services.inference.published import bits_of
from shared import bus as buses
from shared import objects as stores
from shared.bus import Bus
from shared.contracts.ids import policy_prefix
from shared.contracts.life import RunState
from shared.contracts.messages import PolicyPublished, RunStatus
from shared.contracts.run import Ref, RunConfig
from shared.contracts.topics import POLICIES_PUBLISHED, RUNS_STATE
from shared.objects import Objects
from shared.weights import Version, checksum, publish
from shared.weights.checkpoint_objects import upload_directory

RUN, NAME = "r-soak", "soak"
ROWS, CONTEXT = 12, 2048
SWAP_EVERY_S, BASE_EVERY = 5.0, 25  # seconds; versions
SETTLED_S, MOST_PERCENT = 600.0, 5.0
START_S, END_S = 180.0, 120.0
ESTABLISHED = 1  # the first byte of Linux's tcp_info
BAD = (
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b"[" * 5000, 400),
    (b'{"input_ids": [999999]}', 400),
    (b'{"input_ids": [1], "sampling_params": {"temprature": 1}}', 400),
    (b'{"input_ids": [1], "sampling_params": {"max_new_tokens": "' + b"9" * 500_000 + b'"}}', 400),
)


@dataclass
class Soak:
    """One run. `counts`: what became of what was sent, by kind. `odd`: answers that nobody meant."""

    url: str
    pid: int
    bus: Bus
    objects: Objects
    over: asyncio.Event = field(default_factory=asyncio.Event)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    odd: list[str] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)  # seconds since the beginning, bytes
    serial: int = 0
    checksum: str = ""

    async def repeat(self, kind: str, number: int) -> None:
        """Until it is over."""
        act: Callable[[aiohttp.ClientSession, random.Random], Awaitable[None]] = getattr(self, kind)
        random_ = random.Random(f"{kind} {number}")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            while not self.over.is_set():
                try:
                    await act(session, random_)
                    self.counts[kind] += 1
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self.odd.append(f"{kind}: {type(error).__name__}: {error}")
                    await asyncio.sleep(0.5)

    async def answer(self, kind: str, response: aiohttp.ClientResponse, allowed: tuple[int, ...]) -> bytes:
        data = await response.read()
        if response.status not in allowed:
            self.odd.append(f"{kind}: HTTP {response.status}: {data[:200]!r}")
        return data

    # -- what clients do ---------------------------------------------------------------------------------------------

    async def whole(self, session: aiohttp.ClientSession, random_: random.Random) -> None:
        body = asking(random_, random_.randrange(2, 60), random_.randrange(1, 40))
        async with session.post(f"{self.url}/generate", data=body) as response:
            answered = msgspec.json.decode(await self.answer("whole", response, (200,)))
            self.counts["tokens"] += len(answered.get("output_ids", []))

    async def long(self, session: aiohttp.ClientSession, random_: random.Random) -> None:
        body = asking(random_, 200, CONTEXT - 200, stream=random_.random() < 0.5, return_routed_experts=True)
        async with session.post(f"{self.url}/generate", data=body) as response:
            await self.answer("long", response, (200,))

    async def leaves(self, session: aiohttp.ClientSession, random_: random.Random) -> None:
        body = asking(random_, 50, CONTEXT - 50, stream=True)
        async with session.post(f"{self.url}/generate", data=body) as response:
            for _ in range(random_.randrange(1, 20)):
                await response.content.readuntil(b"\n\n")
            response.close()

    async def bad(self, session: aiohttp.ClientSession, random_: random.Random) -> None:
        body, status = random_.choice(BAD)
        async with session.post(f"{self.url}/generate", data=body) as response:
            await self.answer("bad", response, (status,))
        await asyncio.sleep(0.2)

    async def deaf(self, _: aiohttp.ClientSession, random_: random.Random) -> None:
        """Asks for a stream and reads none of it; waits until it is cut off."""
        body, loop = asking(random_, 4, CONTEXT - 4, stream=True), asyncio.get_running_loop()
        with contextlib.closing(self._plain()) as plain:
            await loop.sock_connect(plain, self._address)
            await loop.sock_sendall(plain, _head(len(body)) + body)
            await self._until(lambda: _cut_off(plain))

    async def slow(self, _: aiohttp.ClientSession, random_: random.Random) -> None:
        """Byte by byte, until it is refused."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(self._plain()) as plain:
            await loop.sock_connect(plain, self._address)
            await loop.sock_sendall(plain, _head(100_000))
            answer = asyncio.create_task(loop.sock_recv(plain, 100))
            while not answer.done() and not self.over.is_set():
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(plain, b" ")
                await asyncio.wait({answer}, timeout=0.5)
            answer.cancel()
            if answer.done() and not answer.cancelled() and b" 408 " not in answer.result():
                self.odd.append(f"slow: {answer.result()!r}")

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() and not self.over.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    @property
    def _address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def _plain(self) -> socket.socket:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        return plain

    # -- versions and memory -------------------------------------------------------------------------------------------

    async def trainer(self) -> None:
        """A hundredth of every matrix moves. What lies before a base is deleted: nobody needs it."""
        bits, random_ = bits_of(start()), np.random.default_rng(0)
        before: Version | None = None
        for serial in range(1 << 30):
            if serial:
                bits = {
                    name: array ^ (random_.random(array.shape) < 0.01).astype(array.dtype)
                    if array.dtype == np.uint16
                    else array
                    for name, array in bits.items()
                }
            parent = None if serial % BASE_EVERY == 0 else before
            ref = await asyncio.to_thread(publish, self.objects, RUN, serial, 0, serial, parent, bits)
            before, self.serial, self.checksum = Version(serial, ref, bits), serial, checksum(bits)
            message = PolicyPublished(
                run=RUN,
                serial=serial,
                incarnation=0,
                step=serial,
                parent=-1 if parent is None else serial - 1,
                manifest=ref,
            )
            await self.bus.publish(POLICIES_PUBLISHED, RUN, message)
            self.counts["versions"] += 1
            for old in range(max(0, serial - BASE_EVERY), serial if parent is None else 0):
                for key in list(self.objects.list(f"{policy_prefix(RUN, old)}/")):
                    self.objects.delete(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWAP_EVERY_S):
                    await self.over.wait()
            if self.over.is_set():
                return

    async def weigh(self, seconds: float) -> None:
        """Samples until the time is over."""
        began, process = time.monotonic(), psutil.Process(self.pid)
        while (now := time.monotonic() - began) < seconds:
            self.rss.append((now, process.memory_info().rss))
            await asyncio.sleep(1.0)
        self.over.set()

    async def fill(self) -> None:
        """Every row to its end."""
        async with aiohttp.ClientSession() as session:

            async def one(i: int) -> None:
                body = asking(random.Random(i), 8, CONTEXT, extra_key=str(i))
                async with session.post(f"{self.url}/generate", data=body) as response:
                    await self.answer("fill", response, (200,))

            await asyncio.gather(*(one(i) for i in range(ROWS)))

    async def at_rest(self) -> list[str]:
        """What is wrong once nobody asks any more."""
        info: dict[str, Any] = {}
        async with aiohttp.ClientSession() as session:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    while info.get("serial") != self.serial or info["running"] or info["waiting"]:
                        async with session.get(f"{self.url}/server_info") as response:
                            info = await response.json()
                        await asyncio.sleep(0.5)
            async with session.post(f"{self.url}/weights_checker", json={}) as response:
                live = await response.json()
        wrong = [f"{name}: {info[name]}" for name in ("running", "waiting") if info[name]]
        if (live["serial"], live["checksum"]) != (self.serial, self.checksum):
            wrong.append(f"serves {live['serial']} {live['checksum']}, published {self.serial} {self.checksum}")
        return wrong

    def growth(self, seconds: float) -> float:
        """Percent, between the medians of a tenth of the time each."""
        began, window = min(SETTLED_S, seconds / 4), seconds / 10
        first = statistics.median(rss for at, rss in self.rss if began <= at < began + window)
        last = statistics.median(rss for at, rss in self.rss if at >= seconds - window)
        return 100 * (last / first - 1)


def asking(random_: random.Random, prompt: int, new: int, **more: Any) -> bytes:
    tokens = [random_.randrange(300, 1000) for _ in range(prompt)]
    sampling = {"max_new_tokens": new}
    return json.dumps({"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, **more}).encode()


def _head(size: int) -> bytes:
    return f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()


def _cut_off(plain: socket.socket) -> bool:
    """Whether the other side has reset the connection; found without reading anything."""
    return plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED


async def soak(state: Path, seconds: float) -> Soak:
    objects = stores.connect(f"file:{state / 'objects'}")
    bus = buses.connect(f"sqlite:{state / 'bus.db'}", client="soak")
    nothing = Ref(key="nothing", size=0, checksum="0" * 32)
    base = upload_directory(objects, f"runs/{RUN}/base", BASE)
    config = RunConfig(run=RUN, base=base, pack=nothing, pack_hidden=nothing)
    ref = objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(config))
    await bus.publish(RUNS_STATE, RUN, RunStatus(run=RUN, state=RunState.running, number=1, configs=[ref], started=1.0))
    variables = {"STATE": state, "NAME": NAME, "CACHE_ROWS": ROWS, "CONTEXT": CONTEXT, "LOG_LEVEL": "ERROR"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **{f"ETUDE_{k}": str(v) for k, v in variables.items()}}
    command = [sys.executable, "-m", "services.inference"]
    process = await asyncio.to_thread(lambda: subprocess.Popen(command, env=environment))
    try:
        run = Soak(await _url(state, process), process.pid, bus, objects)
        await run.fill()
        kinds = {"whole": 4, "long": 2, "leaves": 1, "bad": 1, "deaf": 1, "slow": 1}
        async with asyncio.TaskGroup() as group:
            group.create_task(run.weigh(seconds))
            group.create_task(run.trainer())
            for kind, count in kinds.items():
                for i in range(count):
                    group.create_task(run.repeat(kind, i))
        run.odd += await run.at_rest()
        return run
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        await bus.close()


async def _url(state: Path, process: subprocess.Popen[bytes]) -> str:
    """Once it is ready."""
    note = state / "run" / f"{NAME}.json"
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            if process.poll() is not None:
                raise RuntimeError("the engine ended")
            with contextlib.suppress(OSError, ValueError, aiohttp.ClientError):
                url = json.loads(note.read_text())["url"]
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return url
            await asyncio.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--minutes", type=float)
    own, rest = parser.parse_known_args()
    bench = Bench.start(__doc__, rest)
    minutes = own.minutes or bench.pick(120.0, 2.0)
    with tempfile.TemporaryDirectory() as folder:
        run = asyncio.run(soak(Path(folder), minutes * 60))
    percent = run.growth(minutes * 60)
    held = f"{run.rss[-1][1] / 1e6:,.0f} MB at the end"
    what = (
        f"memory of a replica over {minutes:g} minutes, {held}, {run.counts['versions']} versions, {dict(run.counts)}"
    )
    bench.add(record("soak.rss_growth", what, [percent], "%", f"at most {MOST_PERCENT:g} %"))
    bench.end()
    for line in run.odd[:20]:
        print(line, file=sys.stderr)
    return 1 if run.odd or percent > MOST_PERCENT else 0


if __name__ == "__main__":
    sys.exit(main())
