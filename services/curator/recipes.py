"""Which images the tasks of a data set need: Dockerfiles in folders of Harbor tasks, and fields of rows of the SWE-bench family."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.curator.sources.rows import rows_of
from shared.problems import ProblemError
from shared.sandbox.containers.building import Recipe

_TEXTS = ("dockerfile", "Dockerfile", "instance_dockerfile")  # fields of a row that hold a Dockerfile
_NAMES = ("image_name", "docker_image", "image")  # fields of a row that name an image


def recipes(path: Path, dockerfiles: Path | None = None) -> Iterator[tuple[str, Recipe | str]]:
    """Yield every task with what its image is made from, or why nobody can tell.

    `path`: a Harbor task, a folder of them, or a file of rows. `dockerfiles`: of rows, a folder INSTANCE_ID/Dockerfile each.
    Raises ProblemError where there are no tasks.
    """
    tasks = [path] if (path / "task.toml").is_file() else sorted(found.parent for found in path.glob("*/task.toml"))
    if tasks:
        for task in tasks:
            yield task.resolve().name, _of_folder(task)
        return
    if path.is_dir():
        raise ProblemError(
            f"{path}: found no task.toml in it or in its folders; allowed: Harbor tasks, or a file of rows"
        )
    for number, row in rows_of(path):
        name = str(row.get("instance_id") or number)
        yield name, _of_row(name, row, dockerfiles)


def _of_folder(task: Path) -> Recipe | str:
    name, context = task.resolve().name, task / "environment"
    try:
        facts = tomllib.loads((task / "task.toml").read_text()).get("environment", {})
        if isinstance(facts, dict) and (image := facts.get("docker_image")):
            return Recipe(name, image=str(image))
        if compose := next(
            (one for one in ("docker-compose.yaml", "docker-compose.yml") if (context / one).exists()), ""
        ):
            return f"needs several containers (environment/{compose}); allowed: one Dockerfile"
        return Recipe(name, context, (context / "Dockerfile").read_text())
    except FileNotFoundError:
        return "environment/Dockerfile: is missing; allowed: one, or environment.docker_image in task.toml"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"


def _of_row(name: str, row: dict[str, Any], dockerfiles: Path | None) -> Recipe | str:
    if dockerfiles is not None and "/" not in name and (dockerfiles / name / "Dockerfile").is_file():
        folder = dockerfiles / name
        try:
            return Recipe(name, folder, (folder / "Dockerfile").read_text())
        except (OSError, ValueError) as error:
            return f"{folder}/Dockerfile: cannot be read: {error}"
    for field in _TEXTS:
        if isinstance(text := row.get(field), str) and text.strip():
            return Recipe(name, dockerfile=text)
    for field in _NAMES:
        if isinstance(image := row.get(field), str) and image.strip():
            return Recipe(name, image=image.strip())
    fields = ", ".join((*_TEXTS, *_NAMES))
    return f"has no image: found none of the fields {fields}; give --dockerfiles FOLDER with {name}/Dockerfile"
