"""A `verifiers` environment: its examples, by default the first 1,000, become problems of kind `verifiers`.

The source is a TOML file that names the environment (shared.environments.verifiers.problem.Source), for example

    environment = "sums"
    most = 100
    [arguments]
    digits = 3
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from services.curator.sources import Found
from services.curator.sources.clones import Clones
from shared.environments import InfrastructureError
from shared.environments.places import places_of_files
from shared.environments.verifiers import VerifiersEnvironment
from shared.environments.verifiers.orders import Example
from shared.environments.verifiers.problem import Source, VerifiersHidden, VerifiersProblem
from shared.objects import Objects
from shared.problems import ProblemError
from shared.settings import ServiceSettings
from shared.settings import read as read_settings


class _File(Source, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`first`, `most`: which examples. `solved_at`: the reward from which an attempt counts as solved."""

    first: Annotated[int, Meta(ge=0)] = 0
    most: Annotated[int, Meta(ge=1, le=100_000)] = 1000
    solved_at: float = 1.0


def read(path: Path, clones: Clones, objects: Objects) -> Iterator[Found]:
    """Raises ProblemError where the file names no environment, or it cannot be loaded; SandboxUnavailable."""
    try:
        file = msgspec.toml.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        fields = ", ".join(_File.__struct_fields__)
        raise ProblemError(f"{path}: {error}; allowed: a TOML file with the fields {fields}") from None
    source = Source(**{name: getattr(file, name) for name in Source.__struct_fields__})
    try:
        found, total = asyncio.run(_listed(source, file.first, file.most))
    except (InfrastructureError, OSError) as error:
        raise ProblemError(f"{path}: {error}") from None
    if not found:
        raise ProblemError(
            f"{path}: field 'first': found {file.first}; allowed: 0 to {total - 1} of split {source.split!r}"
        )
    for example in found:
        yield _found(example, source, file.solved_at)


async def _listed(source: Source, first: int, most: int) -> tuple[list[Example], int]:
    async with places_of_files(read_settings(ServiceSettings), 1, "bubblewrap") as places:
        return await VerifiersEnvironment(places).examples(source, first, most)


def _found(example: Example, source: Source, solved_at: float) -> Found:
    row = f"{source.environment.replace('/', '-')}-{source.split}-{example.index}"
    origin = f"verifiers:{source.environment}"
    problem = VerifiersProblem(
        id=row,
        prompt=example.prompt,
        cell=row,
        origin=origin,
        source=source,
        index=example.index,
        digest=example.digest,
    )
    return Found(row, problem, VerifiersHidden(id=row, solved_at=solved_at))
