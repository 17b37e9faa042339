"""Sandboxes in pods against a server of the test (tests/cluster.py): what the contract does not say."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from shared.sandbox import SandboxUnavailable
from shared.sandbox.containers import labels
from shared.sandbox.contract import Base, Limits
from shared.sandbox.pods import pod
from shared.sandbox.pods.objects import PLACES
from shared.sandbox.pods.sandboxes import PodSandboxes
from tests import cluster
from tests.patience import patient, until

LIMITS = Limits(memory_mb=512, disk_mb=256, processes=64, seconds=600.0)
IMAGE = "docker:registry.example/any:1"
WORKER = """
import asyncio, sys
from shared.sandbox.contract import Base, Limits
from shared.sandbox.pods.sandboxes import PodSandboxes
from tests.cluster import CLUSTER
async def main():
    adapter = PodSandboxes(CLUSTER, kubeconfig=sys.argv[1])
    sandbox = await adapter.open(Base("pool:small"), Limits(memory_mb=256, seconds=600.0))
    await (await sandbox.session()).run("sleep 1000 &", time_s=30.0)
    print("open", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    cluster.need()
    yield
    cluster.server().refuse = 0
    assert cluster.left() == []


def within(scenario: Callable[[PodSandboxes], Awaitable[None]], image: str = "pool:small") -> None:
    async def run() -> None:
        adapter = cluster.sandboxes(image)
        try:
            async with asyncio.timeout(patient(200)):
                await scenario(adapter)
        finally:
            await adapter.close()

    asyncio.run(run())


def test_a_claim_takes_a_pod_of_the_pool_and_an_image_gets_a_sandbox_of_its_own() -> None:
    async def scenario(adapter: PodSandboxes) -> None:
        found = cluster.server().found
        claimed = await adapter.open(Base(), LIMITS)
        (claim,) = found["sandboxclaims"].values()
        assert claim["spec"]["warmPoolRef"] == {"name": "small"}
        assert labels.Owner.parse(claim["metadata"]["annotations"][labels.OWNER]) == labels.this_process()
        own = await adapter.open(Base(IMAGE), LIMITS)
        (sandbox,) = [one for one in found["sandboxes"].values() if "claim" not in one["metadata"]]
        (container,) = sandbox["spec"]["podTemplate"]["spec"]["containers"]
        assert container["image"] == "registry.example/any:1"
        for one in (claimed, own):
            session = await one.session()
            done = await session.run("echo $OF_THE_IMAGE; touch /usr/x || echo no", time_s=60.0)
            assert done.stdout == b"1\nno\n"
            await one.close()
        assert cluster.left() == []

    within(scenario)


def test_a_pod_serves_its_first_worker_alone() -> None:
    async def scenario(adapter: PodSandboxes) -> None:
        sandbox = await adapter.open(Base(), LIMITS)
        held = sandbox.running.machine
        assert isinstance(held, pod.Pod)
        assert adapter._api is not None
        second = pod.Pod(adapter._api, ("", ""), "")
        second.pod = held.pod
        with pytest.raises(SandboxUnavailable, match="taken: by another worker"):
            await second.enter(60.0, [], 1 << 20)
        assert second.stream is not None
        second.stream.close()
        done = await (await sandbox.session()).run("ls -d /.etude-layer/*; cat /.etude-layer/porter", time_s=60.0)
        assert done.stdout == b""  # no command sees the socket

    within(scenario)


def test_a_pool_whose_pods_are_too_small_or_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(adapter: PodSandboxes) -> None:
        with pytest.raises(ValueError, match="allowed at most 2048"):
            await adapter.open(Base(), Limits(memory_mb=4096))
        monkeypatch.setattr(pod, "READY_S", 0.5)
        with pytest.raises(SandboxUnavailable, match="no-such-pool"):
            await adapter.open(Base("pool:no-such-pool"), LIMITS)
        with pytest.raises(SandboxUnavailable, match="ImagePullBackOff"):
            await adapter.open(Base("docker:registry.example/no-such:1"), LIMITS)
        monkeypatch.setattr(pod, "READY_S", 60.0)
        monkeypatch.setattr(pod, "digest", lambda: "another")
        with pytest.raises(SandboxUnavailable, match="another release"):
            await adapter.open(Base(), LIMITS)

    within(scenario)


@pytest.mark.parametrize(("status", "said"), [(403, "sandboxes.kubernetes.enabled"), (404, "installed"), (500, "500")])
def test_a_cluster_that_refuses_is_infrastructure_with_a_way_out(status: int, said: str) -> None:
    async def scenario(adapter: PodSandboxes) -> None:
        cluster.server().refuse = status
        with pytest.raises(SandboxUnavailable, match=said):
            await adapter.open(Base(), LIMITS)

    within(scenario)


def test_what_is_mounted_stays_readable_after_a_snapshot_is_set_back(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "file").write_text("content")

    async def scenario(adapter: PodSandboxes) -> None:
        base = Base(mounts=((folder, "/opt/data"), (folder, f"{PLACES[0]}/inner")))
        sandbox = await adapter.open(base, LIMITS)
        kept = await sandbox.snapshot()
        await sandbox.restore(kept)
        done = await (await sandbox.session()).run(
            "cat /opt/data/file inner/file; touch inner/x || echo no", time_s=60.0
        )
        assert done.stdout == b"contentcontentno\n"
        with pytest.raises((ValueError, SandboxUnavailable), match="/nowhere"):
            await adapter.open(Base(mounts=((folder, "/nowhere"),)), LIMITS)

    within(scenario)


def test_a_killed_worker_s_pod_ends_and_its_object_is_reaped(tmp_path: Path) -> None:
    server = cluster.server()
    command = [sys.executable, "-c", WORKER, str(server.kubeconfig)]
    path, errors = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, tmp_path / "errors"
    with errors.open("wb") as told:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, env=path)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"open\n", errors.read_text()
        (one,) = server.pods.values()
        assert one.process.poll() is None
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    until(lambda: one.process.poll() is not None, "the pod to end", 60)

    async def scenario(adapter: PodSandboxes) -> None:
        assert await adapter.reap() in (0, 1)  # the first connection has reaped already

    within(scenario)
    assert cluster.left() == []
