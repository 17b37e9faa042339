"""Opens what a source of problems and its gate work with, and runs one source on one project."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.curator.sources.python import Bench, Source
from services.curator.sources.python.contamination import Evaluations
from services.curator.sources.python.making import Made, Making, Progress
from services.curator.sources.python.project import Project
from shared.environments import Places
from shared.environments.places import places_of_files
from shared.environments.repository import RepositoryEnvironment
from shared.objects.directory import DirectoryObjects
from shared.problems.importing import STORE
from shared.scratch import scratch
from shared.settings import ServiceSettings, read


async def made(
    source: Source,
    project: Project,
    *,
    sandbox: str = "bubblewrap",
    against: Sequence[Path] = (),
    most: int = 0,
    within_s: float = float("inf"),
    whole: bool = False,
    seed: str = "0",
    progress: Progress = lambda made: None,
    notes: list[str] | None = None,
) -> tuple[Made, Evaluations]:
    """Make problems of a project. `notes`: filled with what a person should know. For the others see Making. Raises SourceError,
    ProblemError of --against, SandboxUnavailable, OSError."""
    evaluations = Evaluations.read(against)
    settings = read(ServiceSettings)
    async with places_of_files(settings, 2, sandbox) as places:
        if places.sandboxes is None or places.cache is None:
            raise ValueError(f"--sandbox: found {sandbox!r}; allowed: bubblewrap, docker")
        with scratch(places.cache, "making-") as folder:
            folder.chmod(0o755)
            # The trees of candidates are used once: their folder goes at the end, the runtime stays.
            (places.cache / "runtime").mkdir(parents=True, exist_ok=True)
            (folder / "runtime").symlink_to((places.cache / "runtime").absolute())
            own = Places(sandboxes=places.sandboxes, objects=places.objects, cache=folder, bases=places.bases)
            bench = Bench(places.sandboxes, folder, folder, seed, notes if notes is not None else [])
            making = Making(
                source,
                project,
                bench,
                RepositoryEnvironment(own),
                DirectoryObjects(STORE),
                evaluations,
                most=most,
                within_s=within_s,
                whole=whole,
            )
            return await making.run(progress), evaluations
