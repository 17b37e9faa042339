"""Opens the places that a service lends its environments, from its settings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared import objects as stores
from shared import sandbox
from shared.environments import Places
from shared.objects import Objects
from shared.objects.directory import DirectoryObjects
from shared.problems.importing import STORE
from shared.sandbox import bases
from shared.sandbox.contract import Credential
from shared.sandbox.pods.objects import Cluster
from shared.settings import BadSettings, ServiceSettings


@asynccontextmanager
async def opened_places(
    settings: ServiceSettings, workers: int, objects: Objects, kind: str, trees: Objects | None = None
) -> AsyncIterator[Places]:
    """Open the places and close them at the end. `workers`: runs of functions at a time. `objects`: the store of bases. `kind`: the
    setting ETUDE_SANDBOX. `trees`: the store of the problems' trees; None: `objects`. Raises ValueError where the file of
    credentials cannot be used, and SandboxUnavailable."""
    known = credentials(settings)
    held = bases.Held(objects, settings.state / "cache", int(settings.sandbox_bases_gb * 1e9))
    functions, sandboxes = (
        sandbox.connect(kind, workers),
        sandbox.connect_sandboxes(kind, bases=held.folder, cluster=cluster(settings)),
    )
    try:
        yield Places(
            functions=functions,
            sandboxes=sandboxes,
            objects=trees or objects,
            cache=settings.state / "cache" / "environments",
            bases=held,
            image=settings.sandbox_image,
            credentials=known,
            agents=settings.sandbox_agents,
        )
    finally:
        await functions.close()
        await sandboxes.close()
        held.close()


def credentials(settings: ServiceSettings) -> dict[str, Credential]:
    """Return what problems may name. Raises ValueError, SandboxUnavailable where a package is missing."""
    path = settings.sandbox_credentials
    if path is None:
        return {}
    from shared.sandbox import egress

    try:
        return egress.parse_credentials(path.read_bytes())
    except OSError as error:
        raise BadSettings(
            f"ETUDE_SANDBOX_CREDENTIALS: {path}: {error.strerror}; allowed: a file that this service can read, or nothing"
        ) from None
    except ValueError as error:
        raise BadSettings(f"ETUDE_SANDBOX_CREDENTIALS: {path}: {error}") from None


def cluster(settings: ServiceSettings) -> Cluster:
    """Return where sandboxes in pods run."""
    return Cluster(settings.sandbox_namespace, settings.sandbox_loader, settings.sandbox_runtime)


@asynccontextmanager
async def places_of_files(settings: ServiceSettings, workers: int, kind: str) -> AsyncIterator[Places]:
    """Open the places for problems of a user's files, whose trees lie in `importing.STORE`. Raises as `opened_places`."""
    objects = stores.connect(settings.objects_url)
    async with opened_places(settings, workers, objects, kind, trees=DirectoryObjects(STORE)) as places:
        yield places
