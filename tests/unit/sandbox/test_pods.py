"""What the adapter asks of a cluster, against the published schemas, and the first process of a pod."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.environments.repository import rooms
from shared.sandbox import open_sandboxes
from shared.sandbox.containers import labels
from shared.sandbox.contract import Base, Limits
from shared.sandbox.inside import layer, porter
from shared.sandbox.pods import install, objects
from shared.sandbox.pods.objects import Cluster
from tests.schemas import SCHEMAS, wrong

CLUSTER = Cluster(loader="registry.example/etude/worker:1", runtime="kata")
LIMITS = Limits(memory_mb=1024, disk_mb=2048)
NOW = 1_800_000_000.0


def sandbox() -> dict[str, Any]:
    return objects.sandbox("etude-sandbox-1", "python:3.12", LIMITS, ["/opt/etude"], 900.0, "r-1", CLUSTER, NOW)


def test_what_is_asked_of_the_cluster_is_as_its_schemas_say() -> None:
    assert wrong("sandboxes.agents.x-k8s.io", sandbox()) == []
    claim = objects.claim("etude-sandbox-1", "small", 900.0, "r-1", NOW)
    assert wrong("sandboxclaims.extensions.agents.x-k8s.io", claim) == []
    template = {
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "small"},
        "spec": {"podTemplate": {"spec": objects.pod("python:3.12", LIMITS, ["/opt/etude"], CLUSTER)}},
    }
    assert wrong("sandboxtemplates.extensions.agents.x-k8s.io", template) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("spec", "shutdownPolicy"), "Later", "none of"),
        (("spec", "shutdownTime"), "tomorrow", "is no time"),
        (("spec", "podTemplate", "spec", "hostUser"), False, "knows no such field"),
        (("spec", "podTemplate", "spec", "hostUsers"), "no", "is no boolean"),
        (("spec", "podTemplate", "spec", "containers"), [{}], "name: is missing"),
    ],
)
def test_the_schemas_of_the_tests_refuse_what_is_wrong(path: tuple[str, ...], value: object, said: str) -> None:
    found: Any = sandbox()
    inner = found
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    assert any(said in one for one in wrong("sandboxes.agents.x-k8s.io", found))


def test_a_pod_has_no_token_no_capability_and_users_of_its_own() -> None:
    pod = sandbox()["spec"]["podTemplate"]["spec"]
    (container,) = pod["containers"]
    assert (pod["automountServiceAccountToken"], pod["hostUsers"], pod["restartPolicy"]) == (False, False, "Never")
    assert (pod["runtimeClassName"], pod["activeDeadlineSeconds"]) == ("kata", 900)
    for one in (container, *pod["initContainers"]):
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert one["securityContext"]["readOnlyRootFilesystem"]
        assert not one["securityContext"]["allowPrivilegeEscalation"]
    assert objects.memory_limit({"spec": pod}) == 1 << 30
    assert not any("secret" in volume or "hostPath" in volume for volume in pod["volumes"])
    assert "runtimeClassName" not in objects.pod("x", LIMITS, [], replace(CLUSTER, runtime=""))


def test_objects_end_at_a_deadline_and_name_their_owner() -> None:
    for found, life in ((sandbox()["spec"], sandbox()), (objects.claim("n", "p", 900.0, "", NOW)["spec"], None)):
        assert found.get("lifecycle", found)["shutdownTime"] == "2027-01-15T08:15:00Z"
        assert found.get("lifecycle", found)["shutdownPolicy"] == "Delete"
        assert (
            life is None or labels.Owner.parse(life["metadata"]["annotations"][labels.OWNER]) == labels.this_process()
        )


@pytest.mark.parametrize("image", ["", "base:py311", "pool:", "pool:Upper", "docker:", "pool:../x"])
def test_an_image_that_no_pod_can_have_is_refused(image: str) -> None:
    with pytest.raises(ValueError, match="pool:NAME"):
        objects.pool(image)


def test_a_pool_and_an_image_are_told_apart() -> None:
    assert objects.pool("pool:small") == "small"
    assert objects.pool("docker:python:3.12") is None


def test_problems_name_pools_only_where_sandboxes_are_pods() -> None:
    assert rooms._not_of_adapter("kubernetes", "pool:small") is None
    assert rooms._not_of_adapter("kubernetes", "docker:python:3.12") is None
    assert "pool:NAME" in str(rooms._not_of_adapter("kubernetes", "base:py311"))
    assert "ETUDE_SANDBOX=kubernetes" in str(rooms._not_of_adapter("bubblewrap", "pool:small"))


@pytest.mark.parametrize(
    ("pod", "by_memory", "said"),
    [
        ({"terminated": {"reason": "OOMKilled", "exitCode": 137}}, True, "memory limit"),
        ({"terminated": {"reason": "Error", "exitCode": 1}}, False, "Error, exit code 1"),
        ({"running": {}}, False, "Failed Evicted"),
    ],
)
def test_the_end_of_a_pod_is_told(pod: dict[str, Any], by_memory: bool, said: str) -> None:
    statuses = [{"name": objects.CONTAINER, "state": pod}]
    found = objects.ended({"status": {"phase": "Failed", "reason": "Evicted", "containerStatuses": statuses}})
    assert found[0] is by_memory
    assert said in found[1]


def test_without_a_cluster_opening_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("kubernetes")
    from shared.sandbox import SandboxUnavailable
    from shared.sandbox.pods.sandboxes import PodSandboxes

    async def opened() -> None:
        adapter = PodSandboxes(kubeconfig=str(tmp_path / "none"))
        with pytest.raises(SandboxUnavailable, match="KUBECONFIG"):
            await adapter.open(Base("pool:small"), LIMITS)
        with pytest.raises(ValueError, match="workdir"):
            await adapter.open(Base("pool:small", workdir="/app"), LIMITS)

    asyncio.run(opened())
    assert open_sandboxes("kubernetes").name == "kubernetes"


# The first process of a pod


@contextmanager
def connected(order: bytes) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(order)
        yield theirs


def test_an_order_is_read_to_its_end_and_no_further() -> None:
    token = "0" * 32
    order = {"token": token, "seconds": 5, "places": ["/workspace"], "mounts": [], "shm": 1 << 20}
    with connected(json.dumps(order).encode() + b"\nthe loop's") as there:
        assert porter.order(there)["token"] == token
        assert there.recv(100) == b"the loop's"


@pytest.mark.parametrize(
    "order",
    [
        b"no json\n",
        b"[]\n",
        b'{"token": "short", "seconds": 1, "places": [], "mounts": [], "shm": 1}\n',
        b'{"token": "' + b"0" * 32 + b'", "seconds": 1, "places": "x", "mounts": [], "shm": 1}\n',
    ],
)
def test_what_is_no_order_is_refused(order: bytes) -> None:
    with connected(order) as there, pytest.raises(ValueError):
        porter.order(there)


def test_what_a_pod_tells_of_its_token_gives_nobody_the_token() -> None:
    token = "ab" * 16
    assert porter.owner(token) == hashlib.sha256(f"etude pod {token}".encode()).hexdigest()
    assert token not in porter.owner(token)


def test_what_is_installed_starts_and_names_its_release(tmp_path: Path) -> None:
    install.install(tmp_path)
    install.install(tmp_path)  # an init container may be started twice
    home, code = tmp_path / "home", tmp_path / "code"
    assert (code / f"shared/sandbox/inside/{porter.DIGEST}").read_text() == install.digest()
    look = f"import sys; sys.path.insert(0, {str(code)!r}); from shared.sandbox.inside import porter, relay; print(sys.prefix)"
    loader = [str(home / "libraries/loader"), "--library-path", str(home / "libraries")]
    done = subprocess.run([*loader, str(home / "bin/python3"), "-I", "-S", "-c", look], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Layers


@pytest.mark.parametrize("knows_filters", [True, False])
def test_an_archive_is_unpacked_by_a_python_that_knows_no_filters(tmp_path: Path, knows_filters: bool) -> None:
    """tarfile has filters from 3.11.4 on: an earlier one has neither the name nor the argument."""
    (tmp_path / "from").mkdir()
    (tmp_path / "from/file").write_text("text")
    (tmp_path / "from/link").symlink_to("file")
    os.chmod(tmp_path / "from/file", 0o640)
    with (tmp_path / "archive").open("wb") as out:
        layer.pack(str(tmp_path / "from"), out, 1 << 20)
    (tmp_path / "to").mkdir()
    old = (
        ""
        if knows_filters
        else (
            "for name in [one for one in dir(tarfile) if 'filter' in one]: delattr(tarfile, name)\n"
            "kept = tarfile.TarFile.extract\n"
            "def extract(self, member, path='', set_attrs=True, *, numeric_owner=False):\n"
            "    self.extraction_filter = staticmethod(lambda member, path: member)\n"
            "    return kept(self, member, path, set_attrs, numeric_owner=numeric_owner)\n"
            "tarfile.TarFile.extract = extract\n"
        )
    )
    text = f"import tarfile\n{old}from shared.sandbox.inside import layer\n"
    text += f"layer.unpack(open({str(tmp_path / 'archive')!r}, 'rb'), {str(tmp_path / 'to')!r})\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "to/link").read_text() == "text"
    assert (tmp_path / "to/file").stat().st_mode & 0o777 == 0o640
    assert hasattr(tarfile, "fully_trusted_filter")  # else this test shows nothing of the newer one


def test_the_schemas_are_those_of_the_kinds_that_are_used() -> None:
    assert set(SCHEMAS) == {
        "sandboxes.agents.x-k8s.io",
        "sandboxclaims.extensions.agents.x-k8s.io",
        "sandboxtemplates.extensions.agents.x-k8s.io",
        "sandboxwarmpools.extensions.agents.x-k8s.io",
    }
