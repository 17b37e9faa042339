"""Source distributions of small packages of pure Python, fetched by pip, as trees."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path, PurePosixPath

from shared.environments.repository.tree_sources import tree_at
from shared.environments.repository.trees import File, Link

# (package, version with a bug, version with its fix): both have their tests in the source distribution.
RELEASES = (
    ("sqlparse", "0.5.0", "0.5.1"),
    ("cachetools", "5.4.0", "5.5.0"),
    ("parse", "1.20.1", "1.20.2"),
    ("wcwidth", "0.2.12", "0.2.13"),
)
# Bugs are put into these.
SINGLE = (
    ("inflection", "0.5.1"),
    ("jmespath", "1.0.1"),
    ("tabulate", "0.9.0"),
    ("toolz", "0.12.1"),
    ("schema", "0.7.7"),
)


def fetch(folder: Path) -> None:
    """Download what is not there. Needs a package index."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(name, version) for name, *versions in (*RELEASES, *SINGLE) for version in versions]
    missing = [f"{name}=={version}" for name, version in wanted if not list(folder.glob(f"{name}-{version}.tar.gz"))]
    # uv makes environments without pip; the interpreter that they were made from has it.
    python = sys.executable if importlib.util.find_spec("pip") else str(Path(sys.base_prefix) / "bin" / "python3")
    for one in missing:  # one at a time: pip takes no two versions of one package
        print(f"fetching {one}", flush=True)
        # pip asks each source for its metadata, with the build tools that it names. `:all:` would build those from source too.
        command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", one.partition("==")[0]]
        subprocess.run([*command, "--dest", str(folder), one], check=True)


def tree_of(folder: Path, name: str, version: str) -> dict[str, File | Link]:
    """Return the tree of a source distribution, without what its build has added."""
    tree = tree_at(folder / f"{name}-{version}.tar.gz")
    return {
        path: entry
        for path, entry in ((full.partition("/")[2], entry) for full, entry in tree.items())
        if path and not any(part.endswith(".egg-info") or part == "PKG-INFO" for part in path.split("/"))
    }


def is_test(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return any(part in ("test", "tests", "testing") for part in parts[:-1]) or parts[-1].startswith("test_")


def test_files(tree: dict[str, File | Link]) -> list[str]:
    """Return the files that pytest collects."""
    return sorted(
        path
        for path in tree
        if path.endswith(".py") and (PurePosixPath(path).name.startswith("test_") or path.endswith("_test.py"))
    )
