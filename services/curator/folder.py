"""The functions' files of a user's own folder, as `mine.inventory` lists those of installed distributions."""

from __future__ import annotations

import hashlib
from pathlib import Path

from services.curator.mine import Inventory, SourceFile, is_test, module_name
from services.curator.sources.python.project import belongs, described
from shared.environments.repository.trees import File

_ROOTS = ("src", "lib")
_FACTS_BYTES = 1 << 20  # of a file that may say name, version and licence


def inventory_of(folder: Path) -> Inventory:
    """Return the Python files of a folder that are no tests. Its version names their contents, so that a pack is made again when
    they change. Raises ValueError where there are none, OSError."""
    paths = sorted(path for path in folder.rglob("*.py") if path.is_file() and not path.is_symlink())
    relatives = [path.relative_to(folder) for path in paths]
    kept = [path for path in relatives if belongs(path.as_posix()) and not is_test(path) and not _hidden(path.parts)]
    if not kept:
        raise ValueError(
            f"{folder}: found {len(paths)} Python files, none that is no test; allowed: a folder of Python code"
        )
    facts = {
        path.name: File(path.read_bytes())
        for path in folder.iterdir()
        if path.is_file() and path.stat().st_size <= _FACTS_BYTES
    }
    name, version, licence = described(facts, str(folder))
    digest = hashlib.blake2b(digest_size=8)
    files = []
    for path in kept:
        digest.update(f"{path}\0".encode() + (folder / path).read_bytes())
        inner = path.relative_to(path.parts[0]) if path.parts[0] in _ROOTS and len(path.parts) > 1 else path
        files.append(SourceFile(str(folder / path), name, version, module_name(inner), licence))
    return Inventory(files, {name: f"{version}+{digest.hexdigest()}"}, {name: licence})


def _hidden(parts: tuple[str, ...]) -> bool:
    return any(part.startswith(".") for part in parts)
