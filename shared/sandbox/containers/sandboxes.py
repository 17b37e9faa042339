"""The adapter: `Sandboxes` of shared.sandbox.contract over containers of a Docker engine. Its sandboxes: sandbox.py.

Invariant: a container of the pool has run nothing of any task.
"""

from __future__ import annotations

import asyncio
import posixpath
from pathlib import Path

from shared.sandbox import SandboxUnavailable, gateway
from shared.sandbox.containers import bundle, engine, images, labels, machine, reaper, volumes
from shared.sandbox.containers.engine import Engine
from shared.sandbox.containers.pool import Pool
from shared.sandbox.containers.sandbox import CERTIFICATES, ENVIRONMENT, ContainerSandbox, Opened, capabilities, check
from shared.sandbox.contract import NO_NETWORK, Base, Limits, Network, Snapshot
from shared.sandbox.gateway import Gateway, MakeProxy, proxy_of

_PREFIX = "docker:"
_LOOP = "shared.sandbox.inside.container"


class ContainerSandboxes:
    """See shared.sandbox.contract.Sandboxes.

    `address`: of the engine; empty: DOCKER_HOST, or the usual socket. `image`: for bases that name none. `run`: goes into the
    labels. `cpus`: of each sandbox. `pull`: fetch images that the engine does not have. `warm`: containers that are kept ready for
    each kind that was opened. `proxy`: makes a sandbox's way to the network.
    """

    name = "docker"
    memory_by = "the container's cgroup"

    def __init__(
        self,
        address: str = "",
        *,
        image: str = "",
        run: str = "",
        cpus: float = 2.0,
        pull: bool = False,
        warm: int = 1,
        proxy: MakeProxy = proxy_of,
    ) -> None:
        self._address, self._image, self._run, self._cpus, self._pull = address, image, run, cpus, pull
        self.capabilities = capabilities()
        self._pool, self._proxy = Pool(warm), proxy
        self._engine: Engine | None = None
        self._connecting = asyncio.Lock()
        self._opened = Opened()

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise SandboxUnavailable("sandboxes in containers are closed; connect again")
        return self._engine

    async def open(
        self, base: Base, limits: Limits, network: Network = NO_NETWORK, *, snapshot: Snapshot | None = None
    ) -> ContainerSandbox:
        gateway.check(network)
        reference = (
            base.image.removeprefix(_PREFIX) if base.image.startswith(_PREFIX) else "" if base.image else self._image
        )
        if not reference:
            raise ValueError(f"image: found {base.image!r}; allowed: {_PREFIX}<reference>, an image of the engine")
        check(limits)
        found = await self._connected()
        if base.tree is not None and not base.tree.is_dir():
            raise ValueError(f"tree: found {str(base.tree)!r}, which is no folder; allowed: a folder")
        prepared, mounts = await asyncio.to_thread(self._prepare, found, reference, base)
        begins = (prepared.image, base.tree)
        kept = self._opened.kept(snapshot, begins) if snapshot is not None else None
        plan = machine.Plan(
            prepared.image,
            tuple(sorted(mounts.items())),
            prepared.places,
            limits,
            min(self._cpus, found.processors),
            self._run,
            tuple(bundle.command(_LOOP)),
            (CERTIFICATES,) if network.credentials else (),
        )
        way = Gateway(self._proxy(network, labels.name("egress")), CERTIFICATES) if network.allow else None
        own = {"HOME": images.HOME, "USER": images.USER, "LOGNAME": images.USER, **(way.environment if way else {})}
        environment = {**ENVIRONMENT, **prepared.environment, **own, **base.environment}
        layer = await kept.sandbox.give(kept.number) if kept is not None else None
        try:
            running = await self._pool.take(found, plan)
            try:
                await running.begin(limits, environment, prepared.workdir, base.tree, layer, way=way)
            except BaseException:
                await running.close()
                raise
        finally:
            if layer is not None:
                layer.close()
        sandbox = ContainerSandbox(self._opened, running, begins, (limits.disk_mb << 20) * 2)
        self._opened.sandboxes.add(sandbox)
        return sandbox

    async def reap(self) -> int:
        return await asyncio.to_thread(reaper.reap, await self._connected())

    async def close(self) -> None:
        await asyncio.gather(self._pool.close(), self._opened.close())
        found, self._engine = self._engine, None
        if found is not None:
            await asyncio.to_thread(found.close)

    async def _connected(self) -> Engine:
        async with self._connecting:
            if self._engine is None:
                found = await asyncio.to_thread(engine.connect, self._address)
                await asyncio.to_thread(reaper.reap, found)
                self._engine = found
            return self._engine

    def _prepare(self, found: Engine, reference: str, base: Base) -> tuple[images.Prepared, dict[str, str]]:
        prepared = images.prepared(found, reference, pull=self._pull, workdir=base.workdir)
        mounts = bundle.places(found, prepared.image)
        for folder, place in base.mounts:
            if not Path(folder).is_dir():
                raise ValueError(f"mounts: found {str(folder)!r}, which is no folder; allowed: folders")
            mounts[posixpath.normpath(place)] = volumes.volume(found, volumes.entries(Path(folder)), prepared.image)
        return prepared, mounts
