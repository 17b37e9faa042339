"""One pod whose loop is ready: asked of the cluster, waited for, and entered with a token of its own.

Invariants:
- A pod whose start fails, or that nobody waits for any more, is deleted before the error is told.
- The pod ends when the stream ends, or at its deadline; the controller deletes its object at the deadline at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from shared.sandbox import SandboxUnavailable
from shared.sandbox.containers import bundle, labels, machine
from shared.sandbox.containers.running import ContainerChannel, Running
from shared.sandbox.contract import Limits
from shared.sandbox.inside.porter import owner
from shared.sandbox.pods import objects
from shared.sandbox.pods.api import Api, Missing
from shared.sandbox.pods.install import digest
from shared.sandbox.pods.objects import CLAIMS, SANDBOXES, Cluster
from shared.sandbox.pods.stream import ExecStream

READY_S = 600.0  # a node may have to be started and an image to be pulled
_LOOK_S = (0.1, 2.0)  # between two looks at a pod that is not ready, at first and at last
_ANSWER_S = 180.0  # a starved machine takes its time
_RELAY = "shared.sandbox.inside.relay"


class Pod:
    """See shared.sandbox.containers.running.Held. `kind`, `name`: of the object that holds the pod; `pod`: its own name."""

    def __init__(self, api: Api, kind: tuple[str, str], name: str) -> None:
        self._api, self._kind, self._name = api, kind, name
        self.pod = ""
        self.stream: ExecStream | None = None
        self.environment: dict[str, str] = {}  # that the image sets
        self._closed = False

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.stream is not None:
            self.stream.close()
            await self.stream.wait_closed()
        with contextlib.suppress(SandboxUnavailable):  # a cluster that fails leaves it to the controller's deadline
            await self._api.delete(self._kind, self._name)

    async def diagnosis(self) -> tuple[bool, str]:
        said = self.stream.errors.strip()[-500:] if self.stream is not None else ""
        if not self.pod:
            return False, said
        try:
            by_memory, why = objects.ended(await self._api.pod(self.pod))
        except SandboxUnavailable as error:
            return False, str(error)
        return by_memory, f"{why}{': ' + said if said else ''}"

    async def wait(self, limits: Limits) -> None:
        """Wait until the pod runs. Raises SandboxUnavailable; ValueError where a pool's pods have too little memory."""
        pause, why = _LOOK_S[0], ""
        ends = time.monotonic() + READY_S
        while True:
            found = await self._api.get(self._kind, self._name)
            yes, why = objects.ready(found)
            if yes:
                break
            if time.monotonic() > ends:
                raise SandboxUnavailable(f"a sandbox's pod was not ready after {READY_S:g} s: {why}")
            await asyncio.sleep(pause)
            pause = min(_LOOK_S[1], pause * 1.5)
        sandbox = found
        if self._kind == CLAIMS:
            sandbox = await self._api.get(SANDBOXES, str(found["status"]["sandbox"]["name"]))
        metadata = sandbox["metadata"]
        self.pod = str((metadata.get("annotations") or {}).get(objects.POD_NAME) or metadata["name"])
        most = objects.memory_limit(await self._api.pod(self.pod))
        if most is not None and most < limits.memory_mb << 20:
            raise ValueError(
                f"limits: memory_mb: found {limits.memory_mb}; allowed at most {most >> 20}, which the pool's pods have; "
                "raise it in the pool's template"
            )

    async def enter(self, seconds: float, mounts: Sequence[str], shm: int) -> ContainerChannel:
        """Start the relay, give the order, and return the channel to the loop. `shm`: bytes of /dev/shm. Raises
        SandboxUnavailable."""
        token = secrets.token_hex(16)
        stream = self.stream = ExecStream(await self._api.execute(self.pod, bundle.command(_RELAY)))
        order = {"token": token, "seconds": seconds, "places": list(objects.PLACES), "mounts": list(mounts), "shm": shm}
        stream.write(json.dumps(order).encode() + b"\n")
        try:
            async with asyncio.timeout(_ANSWER_S):
                await stream.drain()
                answer: dict[str, Any] = json.loads(await stream.line(1 << 16))
        except (ConnectionError, ValueError, TimeoutError) as error:
            raise SandboxUnavailable(
                f"pod {self.pod}: its first process gave no answer: {error or 'too late'}"
            ) from None
        if "error" in answer:
            raise SandboxUnavailable(f"pod {self.pod}: {answer['error']!s:.500}")
        if answer.get("owner") != owner(token):
            raise SandboxUnavailable(f"pod {self.pod}: found another owner in its answer; the pool gave it out twice")
        if answer.get("code") != digest():
            raise SandboxUnavailable(
                f"pod {self.pod}: found the loop of another release; make the pool's pods with this worker's image "
                "(SandboxWarmPool: updateStrategy Recreate)"
            )
        said = answer.get("environment")
        self.environment = {str(name): str(value) for name, value in said.items()} if isinstance(said, dict) else {}
        return ContainerChannel(stream, stream)  # type: ignore[arg-type] # reads and writes as asyncio's streams do


async def boot(
    api: Api, cluster: Cluster, image: str, limits: Limits, mounts: Sequence[str], run: str
) -> tuple[Running, dict[str, str]]:
    """Get a pod and wait until its loop is ready. Return it, and the variables that its image sets. Raises SandboxUnavailable,
    ValueError."""
    name, seconds = labels.name("sandbox"), limits.seconds + machine.LAST_S
    pool = objects.pool(image)
    stays = seconds + READY_S  # the object's time counts from now, the loop's from when the pod runs
    if pool is not None:
        kind, body = CLAIMS, objects.claim(name, pool, stays, run, time.time())
    elif not cluster.loader:
        raise ValueError(
            f"image: found {image!r:.80}, which needs ETUDE_SANDBOX_LOADER, the image of Étude's workers in the cluster's "
            "registry; or name a pool: pool:NAME"
        )
    else:
        reference = image.removeprefix("docker:")
        kind, body = SANDBOXES, objects.sandbox(name, reference, limits, mounts, stays, run, cluster, time.time())
    held = Pod(api, kind, name)
    channel: ContainerChannel | None = None
    try:
        await api.create(kind, body)
        await held.wait(limits)
        channel = await held.enter(seconds, mounts, limits.memory_mb << 19)
        async with asyncio.timeout(_ANSWER_S):
            await channel.ready
        return Running(held, channel), held.environment
    except BaseException as error:
        if channel is not None:
            await asyncio.shield(channel.close())
        why = (await held.diagnosis())[1] if isinstance(error, SandboxUnavailable) and held.pod else ""
        await asyncio.shield(held.close())
        if isinstance(error, TimeoutError):
            raise SandboxUnavailable(f"the loop in a pod was not ready after {_ANSWER_S:g} s") from None
        if isinstance(error, Missing) and pool is not None:
            raise SandboxUnavailable(f"{error}; pool {pool!r} of namespace {api.namespace!r}") from None
        if why:
            raise SandboxUnavailable(f"{error}; {why}") from None
        raise


async def reap(api: Api) -> int:
    """Delete what dead workers left and what is past its deadline. Return how many sandboxes that were. Raises
    SandboxUnavailable."""
    now, gone = time.time(), 0
    for kind in (CLAIMS, SANDBOXES):
        for found in await api.ours(kind):
            metadata = found["metadata"]
            if labels.expired(metadata.get("annotations") or {}, now):
                gone += await api.delete(kind, str(metadata["name"]))
    return gone
