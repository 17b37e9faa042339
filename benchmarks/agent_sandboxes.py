"""Sandboxes in which an agent lives: from opening to the first result, one command, snapshots, many at a time.

Part of benchmarks/sandboxes.py. Each adapter that works here is measured, the docker SDK's exec_run where there is an engine
(DOCKER_HOST), and SWE-ReX (`pip install swe-rex`, its local deployment: no isolation) where it is installed. The table says
of what is missing here that it was not measured. Containers have the image ETUDE_BENCH_IMAGE of the engine, else one that is
made from this machine's own programs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.records import Bench, record
from shared.sandbox import SandboxUnavailable, archives, open_sandboxes
from shared.sandbox.contract import Base, Limits, Sandboxes, Session
from tests import docker_engine

LIMITS = Limits(memory_mb=512, disk_mb=1024, processes=64)
TIME_S = 60.0
ADAPTERS = {"bwrap": "bubblewrap", "docker": "docker"}  # name in the ids -> kind of adapter
MANY = 64
_DIRTY = 5 << 20  # bytes that a snapshot holds


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


async def milliseconds(count: int, act: Callable[[], Awaitable[object]]) -> list[float]:
    """Return the duration of each of `count` calls."""
    found = []
    for _ in range(count):
        started = time.perf_counter()
        await act()
        found.append((time.perf_counter() - started) * 1e3)
    return found


async def starts(adapter: Sandboxes, base: Base, count: int) -> list[float]:
    """From `open` to the first result, with a machine of the pool ready."""
    pool: Any = getattr(adapter, "_pool", adapter)
    found = []
    for _ in range(count):
        await asyncio.gather(*pool._filling)
        await asyncio.sleep(0.5)  # a machine that has just started is quiet by then
        started = time.perf_counter()
        sandbox = await adapter.open(base, LIMITS)
        await (await sandbox.session()).run("true", time_s=TIME_S)
        found.append((time.perf_counter() - started) * 1e3)
        await sandbox.close()
    return found


async def commands(session: Session, count: int) -> list[float]:
    return await milliseconds(count, lambda: session.run("true", time_s=TIME_S))


async def snapshots(adapter: Sandboxes, base: Base, count: int) -> list[float]:
    """One snapshot and setting it back."""
    sandbox = await adapter.open(base, LIMITS)
    await sandbox.put(archives.pack({f"f{number}": bytes(_DIRTY // 50) for number in range(50)}))

    async def there_and_back() -> None:
        await sandbox.restore(await sandbox.snapshot())

    found = await milliseconds(count, there_and_back)
    await sandbox.close()
    return found


async def many(adapter: Sandboxes, base: Base, count: int) -> float:
    """Return the seconds in which `count` sandboxes, opened at the same time, each give a first result."""

    async def one() -> None:
        sandbox = await adapter.open(base, LIMITS)
        await (await sandbox.session()).run("true", time_s=TIME_S)

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.perf_counter() - started


async def adapter_figures(bench: Bench, name: str, adapter: Sandboxes, base: Base) -> None:
    first = await adapter.open(base, LIMITS)
    session = await first.session()
    one = await commands(session, bench.pick(2000, 300))
    await first.close()
    opened = await starts(adapter, base, bench.pick(30, 6))
    kept = await snapshots(adapter, base, bench.pick(20, 4))
    together = await many(adapter, base, bench.pick(MANY, 8))
    prefix = f"sandbox.{name}"
    bench.add(record(f"{prefix}.start_p50_ms", "open to first result, warm pool", opened, "ms", "15"))
    bench.add(record(f"{prefix}.exec_p50_ms", "a command in a session", [statistics.median(one)], "ms", "1"))
    bench.add(record(f"{prefix}.exec_p99_ms", "a command in a session", [percentile(one, 0.99)], "ms", "3"))
    snapshot = "sandbox.snapshot_ms" if name == "bwrap" else f"{prefix}.snapshot_ms"
    bench.add(record(snapshot, "a snapshot of 5 MiB and back", kept, "ms", "100"))
    bench.add(
        record(f"{prefix}.parallel_s", f"{bench.pick(MANY, 8)} opened at once, each with a result", [together], "s")
    )


def image() -> str:
    """Raises SandboxUnavailable where no engine answers."""
    return os.environ.get("ETUDE_BENCH_IMAGE", "") or docker_engine.image()


async def exec_run_figures(bench: Bench) -> None:
    """The docker SDK's way: a new process of the engine for every command."""
    from docker import from_env

    client = from_env()
    container = client.containers.run(image(), ["sleep", "600"], entrypoint=[], network_mode="none", detach=True)
    try:

        async def one() -> None:
            await asyncio.to_thread(container.exec_run, ["/bin/sh", "-c", "true"])

        found = await milliseconds(bench.pick(100, 10), one)
    finally:
        container.remove(force=True)
        client.close()
    against = "sandbox.docker.exec_p50_ms"
    bench.add(
        record("sandbox.docker_sdk.exec_p50_ms", "docker SDK: exec_run", [statistics.median(found)], "ms", against)
    )


async def swe_rex_figures(bench: Bench) -> None:
    try:
        from swerex.deployment.local import LocalDeployment  # type: ignore[import-not-found, unused-ignore]
        from swerex.runtime.abstract import (  # type: ignore[import-not-found, unused-ignore]
            BashAction,
            CreateBashSessionRequest,
        )
    except ImportError as error:
        print(f"sandbox.swe_rex: not measured: {error}; pip install swe-rex")
        return
    deployment = LocalDeployment()
    await deployment.start()
    try:
        started = time.perf_counter()
        await deployment.runtime.create_session(CreateBashSessionRequest(startup_timeout=TIME_S))
        await deployment.runtime.run_in_session(BashAction(command="true"))
        first = (time.perf_counter() - started) * 1e3
        act = BashAction(command="true")
        one = await milliseconds(bench.pick(100, 10), lambda: deployment.runtime.run_in_session(act))
    finally:
        await deployment.stop()
    bench.add(record("sandbox.swe_rex.start_ms", "SWE-ReX, local: session to first result", [first], "ms"))
    against = "sandbox.bwrap.exec_p50_ms"
    bench.add(
        record("sandbox.swe_rex.exec_p50_ms", "SWE-ReX, local: a command", [statistics.median(one)], "ms", against)
    )


async def _all(bench: Bench) -> None:
    for name, kind in ADAPTERS.items():
        try:
            adapter = open_sandboxes(kind)
        except (ValueError, ImportError):
            continue
        try:
            base = Base(image=f"docker:{image()}") if kind == "docker" else Base()
            await adapter_figures(bench, name, adapter, base)
            if kind == "docker":
                await exec_run_figures(bench)
        except (SandboxUnavailable, ValueError) as error:  # no engine, no image
            print(f"sandbox.{name}: not measured: {error}")
        finally:
            await adapter.close()
    await swe_rex_figures(bench)


def measure(bench: Bench) -> None:
    asyncio.run(_all(bench))
