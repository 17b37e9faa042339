"""The Docker engine: finding it, and turning its errors into ours.

Invariants:
- A missing base, or one that cannot run here, is a ValueError: another attempt would fail as well.
- Every other failure of the engine is SandboxUnavailable: infrastructure, never a reward.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.sandbox import SandboxUnavailable
from shared.sandbox.inside import confine

if TYPE_CHECKING:
    import docker
    from docker.api import APIClient

TIMEOUT_S = 60.0  # one request; an engine under load takes seconds for what usually takes milliseconds
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # as the kernel and as the engine call them
# Of the host, which gives these ids to nobody; bubblewrap's sandboxes have the ones before (shared/sandbox/owners.py).
_USERS = range(0x60010000, 0x60020000)
_MAPPED_USERS = range(20_000, 60_000)  # an engine that maps its users to others of the host has 65,536 of them
_START = "start it (sudo systemctl start docker), or set DOCKER_HOST to the address of one that runs"
FULL_DISK = "the engine's disk is full; free space with docker system prune, or enlarge it"
_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
_OTHER_MACHINE = re.compile(r"exec format error|does not match the specified platform", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Engine:
    """A connection. `machine`: of the engine, e.g. `amd64`. `processors`: how many it has. `users`: ids for containers."""

    client: docker.DockerClient
    machine: str
    processors: int
    users: range

    @property
    def api(self) -> APIClient:
        return self.client.api

    def close(self) -> None:
        self.client.close()


def connect(address: str = "") -> Engine:
    """Connect to the engine at `address`, e.g. `unix:///var/run/docker.sock`; empty: as DOCKER_HOST says, else the usual
    socket. Raises SandboxUnavailable."""
    try:
        import docker
    except ImportError:
        raise SandboxUnavailable(
            "sandboxes in containers need Étude's extra 'docker': pip install 'etude[docker]'"
        ) from None
    with spoken_for("docker engine"):
        if address:
            client = docker.DockerClient(base_url=address, version="auto", timeout=TIMEOUT_S, max_pool_size=64)
        else:
            client = docker.from_env(version="auto", timeout=TIMEOUT_S, max_pool_size=64)
        about, facts = client.version(), client.info()
    found, own = str(about.get("Arch", "")), _MACHINES.get(confine.MACHINE, confine.MACHINE)
    if about.get("Os") != "linux" or found != own:
        client.close()
        raise SandboxUnavailable(
            f"docker engine: found {about.get('Os')}/{found}; allowed: linux/{own}, as this worker; set DOCKER_HOST to such an "
            "engine, or start the worker on a machine of the engine's type"
        )
    mapped = any("name=userns" in one or "name=rootless" in one for one in facts.get("SecurityOptions") or ())
    return Engine(client, found, int(facts.get("NCPU") or 1), _MAPPED_USERS if mapped else _USERS)


@contextlib.contextmanager
def spoken_for(what: str) -> Iterator[None]:
    """Turn errors of the engine into SandboxUnavailable with a way out. `what` names the step for the reader."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except (DockerException, RequestException, OSError) as error:
        raise SandboxUnavailable(f"{what}: {_reason(error)}") from None


def missing(error: BaseException) -> bool:
    """Whether the engine says that the thing asked for does not exist."""
    return getattr(getattr(error, "response", None), "status_code", None) == 404


def in_use(error: BaseException) -> bool:
    """Whether the engine refuses because the thing is in use, or is being removed by another request."""
    return getattr(getattr(error, "response", None), "status_code", None) == 409


def _reason(error: BaseException) -> str:
    text = str(getattr(error, "explanation", None) or error)
    if "PermissionError" in text or ("ermission denied" in text and "socket" in text):
        return (
            "the engine's socket refuses this user; join the group docker (sudo usermod -aG docker USER, then log in "
            "again), or set DOCKER_HOST to a rootless engine"
        )
    if _FULL.search(text):
        return f"{FULL_DISK} ({text:.200})"
    if _OTHER_MACHINE.search(text):
        return f"the image is for another machine type ({text:.200}); build or pull it for this engine's"
    if "FileNotFoundError" in text or "ConnectionRefused" in text or "Connection refused" in text:
        return f"does not answer; {_START}"
    if "Connection aborted" in text or "timed out" in text or "RemoteDisconnected" in text:
        return f"stopped answering ({text:.200}); {_START}"
    return f"{text:.500}"
