"""What the sandbox of a repository problem begins with and may reach: its image and its network, as this service has them.

Invariants:
- A sandbox begins with the image that its problem names, or it is not opened.
- A problem names hosts and credentials; the values of credentials are the service's.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Protocol

import msgspec

from shared.environments import InfrastructureError, Places
from shared.environments.repository import runtime
from shared.environments.repository.checks import wrong_image
from shared.environments.repository.problem import RepositoryProblem
from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import NO_NETWORK, WORKSPACE, Capability, Network

if TYPE_CHECKING:
    from shared.sandbox.contract import Sandbox

_BASE, _DOCKER, _POOL = "base:", "docker:", "pool:"
_LOOK_S = 60.0
_VERSION = (3, 11)  # of an image's Python: the programs of `inside` and pytest's own requirements


class Wanted(Protocol):
    """A problem, or a part of one, that says what its sandbox begins with and reaches, as RepositoryProblem does."""

    @property
    def image(self) -> str: ...

    @property
    def network(self) -> str | list[str] | dict[str, list[str]]: ...


def objection(places: Places, problem: Wanted) -> str | None:
    """Return why no sandbox of this service can be the problem's, as far as its text shows it; None: one can."""
    image = problem.image or places.image
    if wrong := wrong_image(image):
        return f"field 'image': {wrong}"
    if places.sandboxes is not None and (wrong := _not_of_adapter(places.sandboxes.name, image)):
        return f"field 'image': {wrong}"
    try:
        wanted = problem.network
        if (
            isinstance(wanted, dict) and not places.credentials
        ):  # a service that opens no sandbox needs to know no secret
            wanted = {name: value for name, value in wanted.items() if name != "credentials"}
        network = _network(places, wanted)
    except (ValueError, SandboxUnavailable) as error:
        return str(error) if "field" in str(error) else f"field 'network': {error}"
    if network.allow and places.sandboxes is not None and Capability.network not in places.sandboxes.capabilities:
        return (
            f"field 'network': found hosts to allow; allowed: 'none', since this service's sandboxes "
            f"({places.sandboxes.name}) have no network"
        )
    return None


def _not_of_adapter(adapter: str, image: str) -> str | None:
    if adapter == "docker" and not image.startswith(_DOCKER):
        return (
            f"found {image!r:.80}; allowed with ETUDE_SANDBOX=docker: docker:REFERENCE, here or in ETUDE_SANDBOX_IMAGE"
        )
    if adapter == "kubernetes" and not image.startswith((_DOCKER, _POOL)):
        return (
            f"found {image!r:.80}; allowed with ETUDE_SANDBOX=kubernetes: pool:NAME or docker:REFERENCE, here or in "
            "ETUDE_SANDBOX_IMAGE"
        )
    if adapter == "bubblewrap" and image.startswith(_POOL):
        return (
            f"found {image!r:.80}, which needs ETUDE_SANDBOX=kubernetes; allowed with bubblewrap: base:NAME, or nothing"
        )
    if adapter == "bubblewrap" and image.startswith(_DOCKER):
        return (
            f"found {image!r:.80}, which needs ETUDE_SANDBOX=docker; allowed with bubblewrap: base:NAME "
            "(etude sandbox base make NAME --from-image FILE makes one of an image), or nothing"
        )
    return None


def network(places: Places, problem: Wanted) -> Network:
    """Return what the agent's sandbox may reach. Raises InfrastructureError where this service cannot give it."""
    try:
        return _network(places, problem.network)
    except (ValueError, SandboxUnavailable) as error:
        raise InfrastructureError(f"{error} (ETUDE_SANDBOX_CREDENTIALS names the file of credentials)") from None


def _network(places: Places, wanted: object) -> Network:
    """Raises ValueError, and SandboxUnavailable where a package is missing."""
    if wanted == "none":
        return NO_NETWORK
    from shared.sandbox import egress

    return egress.parse(wanted, places.credentials)


async def furnished(places: Places, problem: RepositoryProblem) -> RepositoryProblem:
    """Return the problem with the image that its sandbox begins with. Raises as `image_of`."""
    image = await image_of(places, problem.image)
    return problem if image == problem.image else msgspec.structs.replace(problem, image=image)


async def image_of(places: Places, named: str) -> str:
    """Return what a sandbox begins with, by digest where it is a base, which is unpacked here now. `named`: the problem's image;
    empty: the service's. Raises InfrastructureError where this service cannot have it, SandboxUnavailable."""
    image = named or places.image
    if places.sandboxes is not None and (wrong := _not_of_adapter(places.sandboxes.name, image)):
        raise InfrastructureError(f"image: {wrong}")
    if not image.startswith(_BASE):
        return image
    if places.bases is None:
        raise InfrastructureError(f"image: found {image!r:.80}; this service has no bases")
    try:
        return await places.bases.hold(image)
    except ValueError as error:
        raise InfrastructureError(f"image: {error}") from None


async def require_python(sandbox: Sandbox, image: str) -> None:
    """Raises InfrastructureError where a sandbox of an image has no Python that runs our programs, or another work directory.
    The host's programs need no look."""
    if not image:
        return
    session = await sandbox.session()
    try:
        look = f"import sys; sys.exit(sys.version_info < {_VERSION})"
        script = f"pwd; {runtime.python(image)} -I -S -c {shlex.quote(look)}"
        done = await session.run(script, time_s=_LOOK_S)
    finally:
        await session.close()
    if done.stdout.strip() != WORKSPACE.encode():
        found = done.stdout.decode(errors="replace").strip()
        raise InfrastructureError(
            f"image {image!r:.100}: its work directory is {found!r:.80}; allowed: {WORKSPACE}, or none"
        )
    if done.exit_code != 0:
        said = done.stderr.decode(errors="replace").strip()[-200:]
        raise InfrastructureError(
            f"image {image!r:.100}: found no python3 of {'.'.join(map(str, _VERSION))} or later ({said or 'it is older'}); "
            "make one with it: etude sandbox base make NAME … --python 3.12"
        )
