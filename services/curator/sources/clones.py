"""What lies on this machine for the rows of a data set: a folder with their repositories (clones, bare clones, bundles, or archives
of one commit), and images that were built for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.environments.repository.tree_sources import is_repository, lfs_pointers, tree_at
from shared.environments.repository.trees import File, Link, TreeError

_ENDS = ("", ".git", ".bundle")
_ARCHIVES = ("", ".tar", ".tar.gz", ".tgz", ".tar.zst")
_SHOWN = 3  # paths of a kind that a note names
_SUBMODULES = "its submodules are left out"
_POINTERS = "its files of Git LFS are pointers, without their content"
_KEPT = 2  # trees; rows of one commit follow each other


@dataclass(slots=True)
class Clones:
    """`folder`: holds the repositories; None: no folder was given. For the row's repository `owner/name` these are looked for:
    `owner/name`, `owner__name`, `name`; each with `.git` or `.bundle`, or with `@COMMIT` and an archive's ending. `images`: task or
    row -> its image, as `etude tasks images --out` writes them. `lacking`: what the tree returned last lacks, a kind's name and its
    paths: submodules whose files are not in it, and files that are pointers of Git LFS."""

    folder: Path | None
    images: Mapping[str, str] = field(default_factory=dict)
    lacking: dict[str, list[str]] = field(default_factory=dict)
    _read: dict[tuple[Path, str], tuple[dict[str, File | Link], dict[str, list[str]]]] = field(default_factory=dict)

    def image(self, row: str) -> str:
        """Return the image of a row, or of the task that the row is a step of (`task/step`); empty: none was built."""
        return self.images.get(row) or self.images.get(row.partition("/")[0], "")

    def tree(self, repository: str, commit: str) -> dict[str, File | Link]:
        """Return the tree of a commit. Raises TreeError."""
        if self.folder is None:
            raise TreeError(f"needs the repository {repository} at {commit[:12]}; give a folder of clones with --repos")
        for path in _places(self.folder, repository):
            for end in _ENDS:
                if (at := path.with_name(path.name + end)).exists() and (at.is_file() or is_repository(at)):
                    return self._tree(at, commit)
            for at in sorted(path.parent.glob(f"{_escaped(path.name)}@*")) if path.parent.is_dir() else ():
                if _is_of(at.name.removeprefix(f"{path.name}@"), commit):
                    return self._tree(at, "")
        name = repository.replace("/", "__")
        raise TreeError(
            f"needs the repository {repository} at {commit[:12]}: none in {self.folder}; allowed there: {name} (a clone), "
            f"{name}.git, {name}.bundle, or {name}@{commit[:12]}.tar.gz (or .tar, .tar.zst, a folder)"
        )

    def _tree(self, path: Path, commit: str) -> dict[str, File | Link]:
        key = (path, commit)
        if key not in self._read:
            while len(self._read) >= _KEPT:
                del self._read[next(iter(self._read))]
            left_out: list[str] = []
            tree = tree_at(path, commit, left_out=left_out)
            self._read[key] = tree, {_SUBMODULES: left_out, _POINTERS: lfs_pointers(tree)}
        tree, self.lacking = self._read[key]
        return tree

    def note(self) -> str:
        """Say what the tree that was returned last lacks; empty: nothing."""
        return "; ".join(
            f"{kind}: {', '.join(paths[:_SHOWN])}{', …' if len(paths) > _SHOWN else ''}"
            for kind, paths in self.lacking.items()
            if paths
        )


def _places(folder: Path, repository: str) -> Iterator[Path]:
    """Yield the paths where a repository may lie. Parts of its name that would leave the folder are dropped."""
    parts = [
        part for part in repository.split("/") if part not in ("", ".", "..") and "\\" not in part and "\0" not in part
    ]
    if not parts or len(parts) > 3:
        return
    yield folder.joinpath(*parts)
    yield folder / "__".join(parts)
    yield folder / parts[-1]


def _is_of(name: str, commit: str) -> bool:
    """Return whether an archive's name ends in this commit, in full or in its first seven characters or more."""
    for end in sorted(_ARCHIVES, key=len, reverse=True):
        if end and name.endswith(end):
            name = name.removesuffix(end)
            break
    return bool(commit) and len(name) >= min(7, len(commit)) and commit.startswith(name)


def _escaped(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
