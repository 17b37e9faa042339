"""The adapter: `Sandboxes` of shared.sandbox.contract over pods of a Kubernetes cluster. Its sandboxes: containers/sandbox.py.

Invariant: a pod is given out once. It has run nothing of any task before.
"""

from __future__ import annotations

import asyncio
import posixpath
from pathlib import Path

from shared.sandbox import gateway
from shared.sandbox.containers import labels
from shared.sandbox.containers.sandbox import CERTIFICATES, ENVIRONMENT, ContainerSandbox, Opened, capabilities, check
from shared.sandbox.contract import NO_NETWORK, WORKSPACE, Base, Limits, Network, Snapshot
from shared.sandbox.gateway import Gateway, MakeProxy, proxy_of
from shared.sandbox.pods import api, objects, pod
from shared.sandbox.pods.objects import Cluster


class PodSandboxes:
    """See shared.sandbox.contract.Sandboxes.

    `image`: for bases that name none. `run`: goes into the annotations. `kubeconfig`: a file; empty: the pod's service account,
    else KUBECONFIG, else ~/.kube/config. The pool of warm pods is the cluster's, not ours. `proxy`: makes a sandbox's way to
    the network.
    """

    name = "kubernetes"
    memory_by = "the pod's cgroup, and the loop's watch below it"

    def __init__(
        self,
        cluster: Cluster = Cluster(),
        *,
        image: str = "",
        run: str = "",
        kubeconfig: str = "",
        proxy: MakeProxy = proxy_of,
    ) -> None:
        self._cluster, self._image, self._run, self._kubeconfig = cluster, image, run, kubeconfig
        self.capabilities, self._proxy = capabilities(), proxy
        self._api: api.Api | None = None
        self._connecting = asyncio.Lock()
        self._opened = Opened()

    async def open(
        self, base: Base, limits: Limits, network: Network = NO_NETWORK, *, snapshot: Snapshot | None = None
    ) -> ContainerSandbox:
        gateway.check(network)
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
        way = Gateway(self._proxy(network, labels.name("egress")), CERTIFICATES) if network.allow else None
        own = {"HOME": objects.HOME, "USER": "agent", "LOGNAME": "agent", **(way.environment if way else {})}
        layer = await kept.sandbox.give(kept.number) if kept is not None else None
        try:
            found = await self._connected()
            places = (*mounts, CERTIFICATES) if network.credentials else tuple(mounts)
            running, environment = await pod.boot(found, self._cluster, image, limits, places, self._run)
            try:
                await running.begin(
                    limits,
                    {**ENVIRONMENT, **environment, **own, **base.environment},
                    WORKSPACE,
                    base.tree,
                    layer,
                    mounts=tuple(mounts.values()),
                    watched=True,
                    way=way,
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
