"""The adapter: `Sandboxes` of shared.sandbox.contract over pods of a Kubernetes cluster. Its sandboxes: containers/sandbox.py.

Invariant: a pod is given out once. It has run nothing of any task before.
"""

from __future__ import annotations

import asyncio
import posixpath
from pathlib import Path

from shared.sandbox.containers.sandbox import ENVIRONMENT, ContainerSandbox, Opened, check
from shared.sandbox.contract import NO_NETWORK, WORKSPACE, Base, Capability, Limits, Network, Snapshot
from shared.sandbox.pods import api, objects, pod
from shared.sandbox.pods.objects import Cluster


class PodSandboxes:
    """See shared.sandbox.contract.Sandboxes.

    `image`: for bases that name none. `run`: goes into the annotations. `kubeconfig`: a file; empty: the pod's service account,
    else KUBECONFIG, else ~/.kube/config. The pool of warm pods is the cluster's, not ours.
    """

    name = "kubernetes"
    memory_by = "the pod's cgroup, and the loop's watch below it"
    capabilities = frozenset({Capability.own_rootfs, Capability.sessions, Capability.snapshot, Capability.fork})

    def __init__(self, cluster: Cluster = Cluster(), *, image: str = "", run: str = "", kubeconfig: str = "") -> None:
        self._cluster, self._image, self._run, self._kubeconfig = cluster, image, run, kubeconfig
        self._api: api.Api | None = None
        self._connecting = asyncio.Lock()
        self._opened = Opened()

    async def open(
        self, base: Base, limits: Limits, network: Network = NO_NETWORK, *, snapshot: Snapshot | None = None
    ) -> ContainerSandbox:
        if network != NO_NETWORK:
            raise ValueError("network: found an allow-list; sandboxes in pods have no network: leave it out")
        image = base.image or self._image
        objects.pool(image)
        check(limits)
        if base.workdir not in ("", WORKSPACE):
            raise ValueError(f"workdir: found {base.workdir!r:.80}; allowed in pods: {WORKSPACE}, or none")
        folders = [folder for folder, _ in base.mounts] + ([base.tree] if base.tree is not None else [])
        for folder in folders:
            if not folder.is_dir():
                raise ValueError(f"mounts, tree: found {str(folder)!r}, which is no folder; allowed: folders")
        begins = (image, base.tree)
        kept = self._opened.kept(snapshot, begins) if snapshot is not None else None
        mounts = {posixpath.normpath(place): Path(folder) for folder, place in base.mounts}
        own = {"HOME": objects.HOME, "USER": "agent", "LOGNAME": "agent"}
        layer = await kept.sandbox.give(kept.number) if kept is not None else None
        try:
            found = await self._connected()
            running, environment = await pod.boot(found, self._cluster, image, limits, tuple(mounts), self._run)
            try:
                await running.begin(
                    limits,
                    {**ENVIRONMENT, **environment, **own, **base.environment},
                    WORKSPACE,
                    base.tree,
                    layer,
                    mounts=tuple(mounts.values()),
                    watched=True,
                )
            except BaseException:
                await asyncio.shield(running.close())
                raise
        finally:
            if layer is not None:
                layer.close()
        sandbox = ContainerSandbox(self._opened, running, begins, (limits.disk_mb << 20) * 2)
        self._opened.sandboxes.add(sandbox)
        return sandbox

    async def reap(self) -> int:
        return await pod.reap(await self._connected())

    async def close(self) -> None:
        await self._opened.close()
        found, self._api = self._api, None
        if found is not None:
            await found.close()

    async def _connected(self) -> api.Api:
        async with self._connecting:
            if self._api is None:
                found = await api.connect(self._cluster.namespace, self._kubeconfig)
                try:
                    await pod.reap(found)
                except BaseException:
                    await found.close()
                    raise
                self._api = found
            return self._api
