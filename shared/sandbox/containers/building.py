"""Images of tasks, built from their Dockerfiles in the engine and found again by their contents.

The tag of an image is the digest of everything that it is made from: the Dockerfile, the files that it may copy, and the images
that it begins with. Equal contents are built once per engine, whichever task they belong to.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.sandbox.containers import images, labels, volumes
from shared.sandbox.containers.engine import Engine, missing, spoken_for

REPOSITORY = "etude-task"
KIND = "task"  # not one that the reaper removes
_FORMAT = "1"
_TAIL = 20  # lines of a build that failed
_FROM = re.compile(r"FROM\s+(?:--platform=\S+\s+)?(\S+)(?:\s+AS\s+(\S+))?\s*\Z", re.IGNORECASE)
_ARG = re.compile(r"ARG\s+(\w+)(?:=(\S*))?\s*\Z", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_BUILDKIT = re.compile(r"^\s*(RUN|COPY|ADD)\b.*(--mount=|--link\b|<<)", re.IGNORECASE | re.MULTILINE)
Progress = Callable[[str], None]


class BuildRefused(ValueError):
    """This image cannot be built, and another attempt would fail as well. The text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an image is made from. `task`: for people. `context`: the folder that its Dockerfile copies from; None: it copies
    nothing. `dockerfile`: its text. `image`: of the engine, which is taken as it is instead; empty: none."""

    task: str
    context: Path | None = None
    dockerfile: str = ""
    image: str = ""


@dataclass(frozen=True, slots=True)
class Built:
    """`image`: as a base names it. `new`: it was not there before."""

    image: str
    new: bool


def starts(dockerfile: str) -> list[tuple[int, str]]:
    """Return the images that a Dockerfile begins with, by line: neither `scratch` nor its own stages. Raises BuildRefused."""
    found: list[tuple[int, str]] = []
    arguments: dict[str, str] = {}
    stages: set[str] = set()
    for number, line in _instructions(dockerfile):
        if match := _ARG.match(line):
            if not found:  # only those before the first FROM count there
                arguments[match[1]] = match[2] or ""
        elif match := _FROM.match(line):
            name = _VARIABLE.sub(lambda one: arguments.get(one[1] or one[2]) or one[3] or "", match[1])
            if not name:
                raise BuildRefused(
                    f"Dockerfile, line {number}: FROM {match[1]}: found an ARG without a value; give it a default"
                )
            if name.lower() not in stages and name != "scratch":
                found.append((number, name))
            stages.add((match[2] or "").lower())
    if not found and "scratch" not in dockerfile:
        raise BuildRefused("Dockerfile: found no FROM; allowed: a Dockerfile that begins with an image")
    return found


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Yield each instruction with the number of its first line."""
    begun, held = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not held and (not line.strip() or line.lstrip().startswith("#")):
            continue
        begun = begun if held else number
        held += line.strip()
        if held.endswith("\\"):
            held = held[:-1] + " "
            continue
        yield begun, held
        held = ""


def digest(recipe: Recipe, machine: str, bases: Mapping[str, str]) -> str:
    """Return the name of a recipe's contents. `bases`: image -> id. Raises BuildRefused, OSError."""
    parts = (_FORMAT, machine, recipe.dockerfile, *(f"{name}={bases[name]}" for name in sorted(bases)))
    return volumes.digest(_contents(recipe), *parts)


def _contents(recipe: Recipe) -> list[volumes.Entry]:
    if recipe.context is None:
        return []
    from docker.utils.build import exclude_paths

    ignored = [recipe.context / name for name in ("Dockerfile.dockerignore", ".dockerignore")]
    rules = next((path.read_text(errors="replace").splitlines() for path in ignored if path.is_file()), [])
    rules = [rule.strip() for rule in rules if rule.strip() and not rule.lstrip().startswith("#")]
    wanted = {path.replace(os.sep, "/") for path in exclude_paths(str(recipe.context), rules)}
    try:
        found = volumes.entries(recipe.context)
    except ValueError as error:  # a device, a socket
        raise BuildRefused(str(error)) from None
    return [one for one in found if one.path in wanted and one.path != "Dockerfile"]


def build(
    engine: Engine,
    recipe: Recipe,
    progress: Progress = lambda line: None,
    *,
    pull: bool = False,
    network: str = "default",
    seconds: float = 3600.0,
) -> Built:
    """Return the image of a recipe; build it if the engine does not have it. Raises BuildRefused, SandboxUnavailable, OSError."""
    if recipe.image:
        _need(engine, recipe.image, f"image {recipe.image}", pull)
        return Built(f"docker:{recipe.image}", False)
    bases = {}
    for number, name in starts(recipe.dockerfile):
        bases[name] = _need(engine, name, f"Dockerfile, line {number}: FROM {name}", pull)
    tag = f"{REPOSITORY}:{digest(recipe, engine.machine, bases)}"
    if not _there(engine, tag):
        _build(engine, recipe, tag, progress, network, seconds)
        return Built(f"docker:{tag}", True)
    return Built(f"docker:{tag}", False)


def _need(engine: Engine, name: str, what: str, pull: bool) -> str:
    try:
        return str(images.find(engine, name, pull=pull)["Id"])
    except ValueError as error:
        way = "" if pull else "; or give --pull; without a registry: docker load, or docker tag IMAGE " + name
        raise BuildRefused(f"{what}: {error}{way}") from None


def _there(engine: Engine, tag: str) -> bool:
    from docker.errors import APIError

    with spoken_for("images of tasks"):
        try:
            engine.api.inspect_image(tag)
        except APIError as error:
            if missing(error):
                return False
            raise
    return True


def _build(engine: Engine, recipe: Recipe, tag: str, progress: Progress, network: str, seconds: float) -> None:
    contents = [*_contents(recipe), volumes.Entry("Dockerfile", 0o644, source=recipe.dockerfile.encode())]
    marks = {labels.KIND: KIND, labels.DIGEST: tag.partition(":")[2], "etude.task": recipe.task[:200]}
    said: list[str] = []
    ends = time.monotonic() + seconds
    with tempfile.TemporaryFile() as spool, spoken_for(f"building the image of {recipe.task}"):
        volumes.archive(contents, spool)
        spool.seek(0)
        events = engine.api.build(
            fileobj=spool,
            custom_context=True,
            tag=tag,
            rm=True,
            forcerm=True,
            labels=marks,
            network_mode=network,
            decode=True,
        )
        with contextlib.closing(events):  # closing the connection ends the build, and its container is removed
            for event in events:
                _heard(event, said, progress, recipe)
                if time.monotonic() > ends:
                    raise BuildRefused(
                        f"found a build longer than {seconds:g} s; give --minutes, or a smaller task\n{_end(said)}"
                    )
    if not _there(engine, tag):
        raise BuildRefused(f"the engine ended the build without an image\n{_end(said)}")


def _heard(event: dict[str, Any], said: list[str], progress: Progress, recipe: Recipe) -> None:
    """Take one line of the engine. Raises BuildRefused where it says that the build failed, OSError for a full disk."""
    if (error := event.get("error")) is not None:
        if "no space left on device" in str(error):
            raise OSError(str(error))
        hint = ""
        if _BUILDKIT.search(recipe.dockerfile):
            hint = (
                "; it uses BuildKit's syntax (RUN --mount, COPY --link, heredocs), which the engine's own builder lacks"
            )
        raise BuildRefused(f"the build failed: {error}{hint}; its last lines:\n{_end(said)}")
    for line in str(event.get("stream", "")).splitlines():
        if line.strip():
            said.append(line.rstrip())
            del said[: -4 * _TAIL]
            if line.startswith("Step "):
                progress(line.strip())


def _end(said: list[str]) -> str:
    return "\n".join(f"  {line[:300]}" for line in said[-_TAIL:])
