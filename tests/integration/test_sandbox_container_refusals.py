"""Engines and images that cannot serve: a clear error with the way out, and nothing left in the engine.

tests/integration/test_sandbox_refusals.py says the same of bubblewrap, and has the archives that both refuse.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.sandbox import SandboxUnavailable
from shared.sandbox.containers import engine, labels
from shared.sandbox.containers.sandboxes import ContainerSandboxes
from shared.sandbox.contract import Base, Limits
from tests import docker_engine
from tests.patience import until

LIMITS = Limits(memory_mb=128, disk_mb=64, processes=32, seconds=300.0)


def _there(workdir: str) -> dict[str, set[str]]:
    """Return what the engine has of this process: containers, volumes of one sandbox, bases with this work directory."""
    found = engine.connect()
    try:
        containers = found.api.containers(all=True, filters={"label": labels.OWNER})
        volumes = found.api.volumes(filters={"label": f"{labels.KIND}=files"})["Volumes"] or []
        images = found.api.images(filters={"label": f"{labels.KIND}=base"})
        return {
            "containers": {one["Id"] for one in containers if _mine(one)},
            "volumes": {one["Name"] for one in volumes if labels.DIGEST not in one["Labels"] and _mine(one)},
            "images": {one["Id"] for one in images if workdir in str(found.api.inspect_image(one["Id"])["Config"])},
        }
    finally:
        found.close()


def _mine(one: dict[str, Any]) -> bool:
    """Other tests may use the engine at the same time."""
    return labels.Owner.parse(one["Labels"][labels.OWNER]) == labels.this_process()


@pytest.fixture
def workdir() -> Iterator[str]:
    """A work directory for which the engine has no base yet. Afterwards nothing may be left."""
    docker_engine.need()
    place = f"/work-{secrets.token_hex(6)}"
    before = _there(place)
    yield place
    until(lambda: _there(place) == before, seconds=60, every=0.2)


def _refused(base: Base, **options: Any) -> str:
    """Open a sandbox. Return the error."""

    async def run() -> str:
        sandboxes = ContainerSandboxes(warm=0, **options)
        try:
            sandbox = await sandboxes.open(base, LIMITS)
            await sandbox.session()
        except (SandboxUnavailable, ValueError) as error:
            return str(error)
        finally:
            await sandboxes.close()
        return "opened"

    return asyncio.run(run())


def test_without_an_engine(tmp_path: Path) -> None:
    pytest.importorskip("docker")
    refused = _refused(Base(), address=f"unix://{tmp_path}/docker.sock", image="any")
    assert "does not answer; start it (sudo systemctl start docker), or set DOCKER_HOST" in refused
    assert list(tmp_path.iterdir()) == []


def test_an_image_that_does_not_exist(workdir: str) -> None:
    refused = _refused(Base("docker:etude-test/missing", workdir=workdir))
    assert "'etude-test/missing', which the engine does not have; docker pull etude-test/missing" in refused


def test_an_image_of_another_machine_type(workdir: str) -> None:
    refused = _refused(Base(f"docker:{docker_engine.foreign()}", workdir=workdir))
    assert "found machine type linux/s390x; allowed: linux/" in refused
    assert "docker pull --platform linux/" in refused


def test_an_image_that_says_a_wrong_machine_type() -> None:
    docker_engine.need()
    before = _there("/workspace")["containers"]
    refused = _refused(Base(f"docker:{docker_engine.lying()}"))
    assert "Exec format error" in refused
    assert "another machine type" in refused
    until(lambda: _there("/workspace")["containers"] == before, seconds=60, every=0.2)


@pytest.mark.parametrize("step", ["create_container", "put_archive", "start", "commit"])
def test_on_a_full_disk_of_the_engine(workdir: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step of a base or of a sandbox finds it full."""
    image = docker_engine.image()
    from docker.api import APIClient
    from docker.errors import APIError

    def full(*arguments: object, **options: object) -> None:
        raise APIError("500 Server Error", explanation="write /var/lib/docker/overlay2/x: no space left on device")

    monkeypatch.setattr(APIClient, step, full)
    refused = _refused(Base(f"docker:{image}", workdir=workdir))
    assert "the engine's disk is full; free space with docker system prune, or enlarge it" in refused


def test_on_a_host_that_gives_containers_no_user_namespaces(workdir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine's own profile holds a container without capabilities."""
    from docker.api import APIClient

    image, config = docker_engine.image(), APIClient.create_host_config

    def own_profile(self: Any, **options: Any) -> Any:
        kept = [one for one in options.get("security_opt", ()) if not one.startswith("seccomp=")]
        return config(self, **{**options, "security_opt": kept})

    asyncio.run(_base_made(image))
    monkeypatch.setattr(APIClient, "create_host_config", own_profile)
    refused = _refused(Base(f"docker:{image}"))
    assert "this host gives containers no user namespace" in refused
    assert "user.max_user_namespaces above 0" in refused


async def _base_made(image: str) -> None:
    sandboxes = ContainerSandboxes(warm=0)
    try:
        await sandboxes.open(Base(f"docker:{image}"), LIMITS)
    finally:
        await sandboxes.close()
