"""One container with the loop as its first process, and the stream to it.

Invariants:
- The container has no network, no capability, no way to gain one, no root, and limits on memory, processes and processor time.
- Its user is that of no other live container of the engine: the engine gives out a name with the number once.
- Its root is read-only. What it may write lies in a volume of its own, in /dev/shm and in memory, and goes with it.
- It ends when the stream ends, or at its deadline, and the engine then removes it: the death of its worker leaves nothing.
- A container whose start fails is removed before the error is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.sandbox import SandboxUnavailable
from shared.sandbox.containers import bundle, labels, stream, volumes
from shared.sandbox.containers.engine import Engine, in_use, spoken_for
from shared.sandbox.contract import Limits
from shared.sandbox.inside.container import SCRATCH
from shared.sandbox.inside.layer import VOLUME

OWN_PROCESSES = 8  # the loop and the keepers of its cells
_SCRATCH = 1 << 27  # for the standard input of scripts, which counts as memory
# The project's profile for what starts bubblewrap: Docker's own, and what a process needs to make namespaces without a privilege.
# AppArmor's profile for containers forbids mounts in every namespace and cannot tell ours. Cells have a filter of their own.
_PROFILE = Path(__file__).with_name("seccomp.json")
LAST_S = 15.0  # beyond the sandbox's time: the loop still answers for a script that ends with it
_GRACE_S = 60.0  # beyond the loop's own deadline, until a reaper may remove the container


WARM_S = 1800.0  # that a container may wait in the pool
_TRIES = 64  # of users: two are equal once in some thousand times


@dataclass(frozen=True, slots=True)
class Plan:
    """What a container begins with. `volumes`: (place inside, volume). `places`: where the sandbox may write, the work directory
    first. `command`: starts the loop, which gets its options besides. `filled`: folders that the worker fills when a sandbox
    begins, and that nothing inside can write to."""

    image: str
    volumes: tuple[tuple[str, str], ...]
    places: tuple[str, ...]
    limits: Limits
    cpus: float
    run: str
    command: tuple[str, ...]
    filled: tuple[str, ...] = ()


class Machine:
    def __init__(self, engine: Engine, container: str, started: stream.Stream, began: float) -> None:
        self.engine, self.container, self.stream, self._began = engine, container, started, began
        self._closed = False

    async def close(self) -> None:
        """Remove the container. Repeating it does nothing."""
        if self._closed:
            return
        self._closed = True
        self.stream.close()
        await asyncio.to_thread(remove, self.engine, self.container)

    async def diagnosis(self) -> tuple[bool, str]:
        """After the stream has ended: return whether the memory limit ended the container, and a text for people."""
        return await asyncio.to_thread(self._diagnosis)

    def _diagnosis(self) -> tuple[bool, str]:
        said = self.stream.errors.strip()[-500:]
        try:
            with spoken_for("docker engine"):
                events = self.engine.api.events(
                    since=int(self._began) - 1,
                    until=int(time.time()) + 1,
                    filters={"container": self.container},
                    decode=True,
                )
                seen = {str(event.get("Action", event.get("status", ""))) for event in events}
        except SandboxUnavailable as error:
            return False, str(error)
        if "oom" in seen and "die" in seen:
            return True, "the sandbox's memory limit ended its first process"
        return (
            False,
            f"the sandbox's container ended ({', '.join(sorted(seen)) or 'no event'}){': ' + said if said else ''}",
        )


async def start(engine: Engine, plan: Plan) -> Machine:
    """Create a container and start the loop in it. Raises SandboxUnavailable; ValueError where the base is gone."""
    began = time.time()
    begun = asyncio.ensure_future(asyncio.to_thread(_start, engine, plan))
    try:
        container, connection, keep = await asyncio.shield(begun)
    except asyncio.CancelledError:
        begun.add_done_callback(lambda done: _abandon(engine, done))
        raise
    return Machine(engine, container, await stream.opened(connection, keep), began)


def _abandon(engine: Engine, done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and done.exception() is None:
        container, connection, _ = done.result()
        connection.close()
        asyncio.get_running_loop().run_in_executor(None, remove, engine, container)


def _start(engine: Engine, plan: Plan) -> tuple[str, Any, object]:
    from docker.errors import ImageNotFound

    with spoken_for("a sandbox's container"):
        try:
            container = _created(engine, plan)
        except ImageNotFound:
            raise ValueError(f"image: found {plan.image!r}, which the engine no longer has") from None
        try:
            connection, keep = stream.attach(engine, container)
            engine.api.start(container)
        except BaseException:
            remove(engine, container)
            raise
    return container, connection, keep


def _created(engine: Engine, plan: Plan) -> str:
    """Create a container with a user of its own. The engine refuses a name, and with it a user, that another one has."""
    from docker.errors import APIError

    for _ in range(_TRIES):
        uid = engine.users.start + secrets.randbelow(len(engine.users))
        try:
            return _create(engine, plan, uid)
        except APIError as error:
            if not in_use(error) or "name" not in str(error.explanation or ""):
                raise
    raise SandboxUnavailable(f"docker engine: {_TRIES} users in a row are in use; close sandboxes")


def _create(engine: Engine, plan: Plan, uid: int) -> str:
    memory = plan.limits.memory_mb << 20
    config = engine.api.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges", f"seccomp={_PROFILE.read_text()}", "apparmor=unconfined"],
        tmpfs={SCRATCH: f"rw,noexec,nosuid,nodev,mode=1777,size={min(_SCRATCH, memory // 4)}"},
        ipc_mode="private",
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=plan.limits.processes + OWN_PROCESSES,
        nano_cpus=int(plan.cpus * 1e9),
        shm_size=memory // 2,  # it counts as such, and must not fill the sandbox alone
        mounts=_mounts(plan.volumes),
        read_only=True,
        log_config={
            "type": "none",
            "config": {},
        },  # the stream is no log, and an endless one would fill the engine's disk
        auto_remove=True,
        init=False,
    )
    # The kernel gives a cell no /proc of its own while parts of the container's are masked. Inside, nobody is root there.
    config |= {"MaskedPaths": [], "ReadonlyPaths": []}
    seconds = plan.limits.seconds + LAST_S + WARM_S
    options = {"seconds": seconds, "places": plan.places, "inner": [place for place, _ in plan.volumes]}
    options["mounts"] = plan.filled
    made = engine.api.create_container(
        plan.image,
        [*plan.command, json.dumps(options)],
        entrypoint=[],
        user=f"{uid}:{uid}",
        working_dir="/",
        hostname="sandbox",
        name=f"etude-sandbox-{uid}",
        environment=bundle.CLEAN,
        stdin_open=True,  # and closed with the stream
        host_config=config,
        healthcheck={"test": ["NONE"]},
        labels=labels.labels("sandbox", seconds=seconds + _GRACE_S, run=plan.run),
    )
    return str(made["Id"])


def _mounts(volumes: Sequence[tuple[str, str]]) -> Sequence[Any]:
    from docker.types import Mount

    # An anonymous volume goes with its container. The base has a folder there that everybody may write to, whose mode it takes.
    own = Mount(VOLUME, None, type="volume", labels=labels.labels("files", seconds=labels.CACHE_S))
    return [own, *(Mount(place, one, type="volume", no_copy=True, read_only=True) for place, one in sorted(volumes))]


def remove(engine: Engine, container: str) -> None:
    """Remove a container, running or not. An engine that fails leaves it to the reaper."""
    with contextlib.suppress(SandboxUnavailable), spoken_for("removing a sandbox's container"):
        volumes.remove(engine, container)
