"""What the adapter asks of a cluster: `Sandbox` and `SandboxClaim` of agent-sandbox, version v1beta1. Pure functions.

Invariants:
- Every object names its owner and its deadline, and asks the controller to delete it at that deadline.
- A pod has no service account token, no capability, no way to gain one, and a user namespace of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shared.sandbox.containers import bundle, labels
from shared.sandbox.contract import WORKSPACE, Limits
from shared.sandbox.inside.container import SCRATCH, UID
from shared.sandbox.inside.layer import VOLUME

CORE, EXTENSIONS, VERSION = "agents.x-k8s.io", "extensions.agents.x-k8s.io", "v1beta1"
SANDBOXES, CLAIMS = (CORE, "sandboxes"), (EXTENSIONS, "sandboxclaims")  # group and plural
POD_NAME = f"{CORE}/pod-name"  # annotation of a Sandbox that took its pod from a pool
CONTAINER = "sandbox"
HOME = "/home/agent"
PLACES = (WORKSPACE, HOME, "/tmp", "/var/tmp")  # where a sandbox may write, the work directory first
PORTER = "shared.sandbox.inside.porter"
INSTALL = "/install"  # where the init container sees the volume that it fills
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?\Z")
_FINISHED_S = 30  # that a claim outlives its pod: a worker that lives asks why it ended
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where sandboxes run. `namespace`: holds nothing else. `loader`: the image that brings the loop into a pod, that of Étude's
    workers; needed for images, not for pools. `runtime`: the pods' RuntimeClass; empty: the cluster's default. `seccomp`: the
    profile below the kubelet's folder; empty: the runtime's default."""

    namespace: str = "etude-sandboxes"
    loader: str = ""
    runtime: str = ""
    seccomp: str = "profiles/etude-worker.json"
    cpus: float = 2.0


def pool(image: str) -> str | None:
    """Return the name of the pool that a base names, or None where it names an image. Raises ValueError for any other base."""
    kind, _, name = image.partition(":")
    if kind == "docker" and name:
        return None
    if kind == "pool" and _NAME.match(name):
        return name
    raise ValueError(
        f"image: found {image!r:.80}; allowed in pods: pool:NAME, a SandboxWarmPool of the namespace, or docker:REFERENCE"
    )


def claim(name: str, pool: str, seconds: float, run: str, now: float) -> dict[str, Any]:
    """Return a claim on a pod of a warm pool. The controller deletes it soon after the pod has ended."""
    lifecycle = {"shutdownTime": _at(now + seconds), "shutdownPolicy": "Delete", "ttlSecondsAfterFinished": _FINISHED_S}
    spec = {"warmPoolRef": {"name": pool}, "lifecycle": lifecycle}
    head = {"apiVersion": f"{EXTENSIONS}/{VERSION}", "kind": "SandboxClaim"}
    return {**head, "metadata": _metadata(name, seconds, run), "spec": spec}


def sandbox(
    name: str, image: str, limits: Limits, mounts: Sequence[str], seconds: float, run: str, cluster: Cluster, now: float
) -> dict[str, Any]:
    """Return a sandbox of its own with an image. `mounts`: folders that the loop will mount over."""
    spec = {
        "podTemplate": {
            "metadata": {"labels": {labels.KIND: "sandbox"}},
            "spec": {**pod(image, limits, mounts, cluster), "activeDeadlineSeconds": int(seconds)},
        },
        "shutdownTime": _at(now + seconds),
        "shutdownPolicy": "Delete",
        "service": False,
    }
    head = {"apiVersion": f"{CORE}/{VERSION}", "kind": "Sandbox"}
    return {**head, "metadata": _metadata(name, seconds, run), "spec": spec}


def pod(image: str, limits: Limits, mounts: Sequence[str], cluster: Cluster) -> dict[str, Any]:
    """Return the spec of a pod. The template of a pool has the same (infra/helm/templates/sandboxes.yaml)."""
    memory, quiet = limits.memory_mb, {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    folders = dict.fromkeys((*PLACES, *mounts))
    volumes: list[dict[str, Any]] = [
        {"name": "loop", "emptyDir": {}},
        {"name": "layer", "emptyDir": {"sizeLimit": f"{limits.disk_mb * 4}Mi"}},  # snapshots lie there, too
        {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": f"{min(128, max(1, memory // 4))}Mi"}},
        {"name": "places", "emptyDir": {"sizeLimit": "1Mi"}},  # mount points; nothing is written to them
    ]
    mounted: list[dict[str, Any]] = [
        {"name": "loop", "mountPath": bundle.HOME, "subPath": "home", "readOnly": True},
        {"name": "loop", "mountPath": bundle.CODE, "subPath": "code", "readOnly": True},
        {"name": "layer", "mountPath": VOLUME},
        {"name": "scratch", "mountPath": SCRATCH},
        *({"name": "places", "mountPath": path, "subPath": str(at)} for at, path in enumerate(folders)),
    ]
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostUsers": False,  # a user of its own on the node, and with it its own count of processes
        "hostname": "sandbox",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},  # the field must name one; nothing answers there
        "terminationGracePeriodSeconds": 0,
        **({"runtimeClassName": cluster.runtime} if cluster.runtime else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "Localhost", "localhostProfile": cluster.seccomp}
            if cluster.seccomp
            else {"type": "RuntimeDefault"},
            "appArmorProfile": {"type": "Unconfined"},  # the default profile forbids mounts in every namespace
        },
        "initContainers": [
            {
                "name": "loader",
                "image": cluster.loader,
                "command": ["python", "-m", "shared.sandbox.pods.install", INSTALL],
                "securityContext": {**quiet, "readOnlyRootFilesystem": True},
                "volumeMounts": [{"name": "loop", "mountPath": INSTALL}],
                "resources": {"limits": {"memory": "512Mi"}},
            }
        ],
        "containers": [
            {
                "name": CONTAINER,
                "image": image,
                "command": bundle.command(PORTER),
                "workingDir": "/",
                "env": [{"name": name, "value": value} for name, value in bundle.CLEAN.items()],
                "securityContext": {**quiet, "readOnlyRootFilesystem": True, "procMount": "Unmasked"},
                "resources": {
                    "requests": {"memory": f"{memory}Mi", "cpu": "100m"},
                    "limits": {"memory": f"{memory}Mi", "cpu": f"{int(cluster.cpus * 1000)}m"},
                },
                "volumeMounts": mounted,
            }
        ],
        "volumes": volumes,
    }


def memory_limit(pod: Mapping[str, Any]) -> int | None:
    """Return the bytes of memory that a pod's sandbox may have, or None where it has no limit, or one that nobody can read."""
    for container in pod.get("spec", {}).get("containers", ()):
        if container.get("name") == CONTAINER:
            said = str(((container.get("resources") or {}).get("limits") or {}).get("memory", ""))
            found = re.fullmatch(r"(\d+)([A-Za-z]*)", said)
            return int(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else None
    return None


def ready(found: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether a Sandbox or a claim is ready, and what its condition says."""
    for condition in (found.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready":
            return condition.get("status") == "True", f"{condition.get('reason', '')}: {condition.get('message', '')}"
    return False, "no controller has looked at it; is agent-sandbox running in the cluster?"


def ended(pod: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the memory limit ended a pod's sandbox, and a text for people."""
    status = pod.get("status") or {}
    for one in status.get("containerStatuses") or ():
        over = (one.get("state") or {}).get("terminated")
        if one.get("name") == CONTAINER and over:
            if over.get("reason") == "OOMKilled":
                return True, "the sandbox's memory limit ended its first process"
            return False, f"the sandbox's container ended ({over.get('reason', '')}, exit code {over.get('exitCode')})"
    return False, f"the sandbox's pod: {status.get('phase', 'unknown')} {status.get('reason', '')}".strip()


def _metadata(name: str, seconds: float, run: str) -> dict[str, Any]:
    # The owner's name is no value of a label: those have at most 63 characters.
    return {
        "name": name,
        "labels": {labels.KIND: "sandbox"},
        "annotations": labels.labels("sandbox", seconds=seconds, run=run),
    }


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
