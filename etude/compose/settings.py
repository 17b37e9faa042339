"""`.env` and the compose files: what they demand, and whether it is there. No engine is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from etude.finding import Finding

COMPOSE_FILE = "docker-compose.yml"
_LINE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*$")
_DEMANDED = re.compile(r"\$\{([A-Za-z_]\w*):?\?")  # ${NAME:?…} and ${NAME?…}
WRITER = "python3 infra/docker/env.py"


def read(path: Path) -> dict[str, str]:
    """NAME → value of an `.env`. Empty where there is none."""
    if not path.is_file():
        return {}
    found = {}
    for line in path.read_text(errors="replace").splitlines():
        if match := _LINE.match(line):
            value = match[2]
            quoted = re.match(r"(['\"])(.*?)\1", value)
            found[match[1]] = quoted[2] if quoted else re.split(r"(?:^|\s)#", value)[0].strip()
    return found


def demanded(compose_file: Path) -> Iterator[str]:
    for line in compose_file.read_text(errors="replace").splitlines():
        if not line.lstrip().startswith("#"):
            yield from _DEMANDED.findall(line)


def check(folder: Path) -> Finding:
    """The shell's variables count before the file's, as they do for docker compose."""
    path = folder / ".env"
    given = {**read(path), **os.environ}
    separator = given.get("COMPOSE_PATH_SEPARATOR") or os.pathsep
    files = [folder / name for name in (given.get("COMPOSE_FILE") or COMPOSE_FILE).split(separator) if name]
    if absent := [str(file) for file in files if not file.is_file()]:
        return Finding(
            "compose files",
            False,
            f"not there: {', '.join(absent)}",
            "call it from the checkout" if not given.get("COMPOSE_FILE") else f"mend COMPOSE_FILE in {path}",
        )
    names = sorted({name for file in files for name in demanded(file)})
    missing = [name for name in names if not given.get(name)]
    if not missing:
        return Finding(str(path), True, f"names all {len(names)} that are demanded" if path.is_file() else "not needed")
    if not path.is_file():
        return Finding(
            str(path), False, f"not there; demanded: {', '.join(missing)}", f"{WRITER} writes it, with fresh secrets"
        )
    if emptied := [name for name in missing if name in os.environ and read(path).get(name)]:
        return Finding(
            str(path),
            False,
            f"the shell has {', '.join(emptied)} empty, and counts first",
            f"unset {' '.join(emptied)}",
        )
    return Finding(
        str(path),
        False,
        f"lacks a value for {', '.join(missing)}",
        f"{WRITER} adds fresh ones and leaves the rest as it is; or fill them in, letters and digits alone",
    )
