"""Reads a source tree from a folder, an archive, a git repository at a commit, or a git bundle.

From git it reads the tree of one commit, blob by blob: no hook, filter or attribute of the repository runs or changes a byte.
The files of submodules are not in that tree. It is refused, unless the caller asks which submodules are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import zstandard

from shared.environments.repository.trees import (
    MAX_BYTES,
    MAX_FILES,
    File,
    Link,
    TreeError,
    check,
    from_folder,
    from_tar,
)

ALLOWED = "a folder, a .tar, .tar.gz or .tar.zst, a git repository or a git bundle"
_GIT_S = 600.0  # a bundle of a large repository is indexed first
_PIECE = 1 << 16
_LACKS = "lacks these prerequisite commits"  # what git says of a bundle that was made of a range
_COMMITS = re.compile(r"\b[0-9a-f]{40,64}\b")
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/v1\n", 1024  # Git LFS, docs/spec.md
_NULL = "/dev/null"
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": _NULL,
    "GIT_NO_LAZY_FETCH": "1",  # a partial clone would ask the network
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}


def tree_at(source: Path, commit: str = "", *, left_out: list[str] | None = None) -> dict[str, File | Link]:
    """Read a tree. `commit`: of a git repository or bundle; empty: the folder as it stands, or a bundle's HEAD. For a folder
    or an archive without git it is a label and changes nothing. `left_out`: gets the paths of submodules whose files are not there;
    None: a tree with such a submodule is refused. Raises TreeError."""
    missing: list[str] = []
    tree = _read(source, commit, missing)
    if left_out is not None:
        left_out += missing
    elif missing:
        raise TreeError(
            f"{source}: {min(missing)!r:.200}: is a submodule, one of {len(missing)}, and its files are not in the tree; allowed: "
            "the files themselves: after `git submodule update --init --recursive` name the work folder without `commit`. If the "
            "tests do not need them: `git archive -o tree.tar COMMIT`, and name tree.tar"
        )
    return tree


def _read(source: Path, commit: str, missing: list[str]) -> dict[str, File | Link]:
    """`missing`: gets the submodules whose files are not there."""
    if source.is_dir():
        if is_repository(source) and (commit or not (source / ".git").exists()):
            return from_git(source, commit or "HEAD", missing)
        tree = from_folder(source)
        missing += _unfilled(source, tree)
        return tree
    try:
        with source.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise TreeError(f"{source}: cannot be read ({error.strerror}); allowed: {ALLOWED}") from None
    if head.startswith(b"# v2 git bundle") or head.startswith(b"# v3 git bundle"):
        return from_bundle(source, commit or "HEAD", missing)
    return from_archive(source, head)


def _unfilled(folder: Path, tree: Mapping[str, File | Link]) -> list[str]:
    """Return the submodules of a work folder that were not checked out."""
    if not (folder / ".git").exists() or not (folder / ".gitmodules").exists():
        return []
    listed = _git(folder, "ls-files", "--stage", "-z", place=folder).decode(errors="replace").split("\0")
    known = [line.partition("\t")[2] for line in listed if line.startswith("160000 ")]
    return [path for path in known if not any(name.startswith(f"{path}/") for name in tree)]


def require_files(source: Path, tree: Mapping[str, File | Link]) -> None:
    """Raise TreeError for a tree that holds no file, or pointers to files that are elsewhere. `source`: what errors name."""
    if not tree:
        raise TreeError(f"{source}: found no file in it; allowed: a tree with at least one")
    if pointers := lfs_pointers(tree):
        raise TreeError(
            f"{source}: {pointers[0]!r:.200}: is a pointer of Git LFS, one of {len(pointers)}, and its content is not in the "
            "tree; allowed: the files themselves: after `git lfs pull` name the work folder without `commit`"
        )


def lfs_pointers(tree: Mapping[str, File | Link]) -> list[str]:
    """Return the paths of files that are pointers of Git LFS instead of their content, in order."""
    return sorted(
        path
        for path, entry in tree.items()
        if isinstance(entry, File) and len(entry.data) < _POINTER_BYTES and entry.data.startswith(_POINTER)
    )


def is_repository(folder: Path) -> bool:
    """Return whether the folder is a git repository, bare or with a work tree."""
    return (folder / ".git").exists() or all((folder / name).exists() for name in ("HEAD", "objects", "refs"))


def from_archive(path: Path, head: bytes) -> dict[str, File | Link]:
    """Read a tar, plain or compressed. `head`: its first bytes. Raises TreeError."""
    opened: Callable[[IO[bytes]], IO[bytes]]
    if head.startswith(b"\x1f\x8b"):
        import gzip

        opened = lambda file: gzip.GzipFile(fileobj=file)  # type: ignore[assignment,return-value]  # noqa: E731
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        opened = lambda file: reader.stream_reader(file, read_across_frames=True)  # noqa: E731
    elif head[257:262] == b"ustar" or tarfile.is_tarfile(path):
        opened = lambda file: file  # noqa: E731
    else:
        raise TreeError(f"{path}: found no archive that is known, first bytes {head[:8]!r}; allowed: {ALLOWED}")
    try:
        with path.open("rb") as raw, opened(raw) as file:
            return from_tar(iter(lambda: file.read(_PIECE), b""), history=True)
    except TreeError as error:
        raise TreeError(f"{path}: {error}") from None
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise TreeError(f"{path}: cannot be read ({error})") from None


def from_bundle(path: Path, commit: str, missing: list[str]) -> dict[str, File | Link]:
    """Read the tree of a commit that the bundle holds. `missing`: gets its submodules. Raises TreeError."""
    with unbundled(path) as folder:
        return from_git(folder, commit, missing, named=path)


@contextlib.contextmanager
def unbundled(path: Path) -> Iterator[Path]:
    """Yield a bare repository with the bundle's contents; it is removed at the end of the block. Raises TreeError."""
    with tempfile.TemporaryDirectory(prefix="etude-bundle-") as name:
        folder = Path(name)
        _git(folder, "init", "--quiet", "--bare", str(folder), place=folder)
        # A bundle may name its HEAD; without one, a bundle of a single branch has only one meaning.
        heads = _git(folder, "bundle", "list-heads", str(path.absolute()), place=path).decode().split("\n")
        found = {name: commit for commit, _, name in (line.partition(" ") for line in heads) if name}
        wanted = ["HEAD"] if "HEAD" in found else []
        _git(folder, "fetch", "--quiet", str(path.absolute()), "+refs/*:refs/*", *wanted, place=path)
        head = found.get("HEAD") or (next(iter(found.values())) if len(found) == 1 else None)
        if head:
            _git(folder, "update-ref", "--no-deref", "HEAD", head, place=path)
        yield folder


def from_git(
    repository: Path, commit: str, missing: list[str] | None = None, named: Path | None = None
) -> dict[str, File | Link]:
    """Read the tree of a commit. `missing`: gets its submodules; None: nobody asks for them. `named`: what errors call the
    repository; None: its path. Raises TreeError."""
    place = named or repository
    sha = resolve(repository, commit, place)
    tree: dict[str, File | Link] = {}
    blobs: list[tuple[str, str, str]] = []
    size = 0
    for line in _git(repository, "ls-tree", "-r", "-z", "-l", "--full-tree", sha, place=place).split(b"\0"):
        if not line:
            continue
        facts, _, raw = line.partition(b"\t")
        mode, kind, blob, length = facts.decode().split()
        if kind != "blob":  # a submodule
            if missing is not None:
                missing.append(raw.decode(errors="replace"))
            continue
        try:
            path = raw.decode()
        except UnicodeDecodeError:
            raise TreeError(f"{place}: commit {sha[:12]}: {raw!r:.200}: is no UTF-8") from None
        blobs.append((path, mode, blob))
        size += int(length)
    if len(blobs) > MAX_FILES or size > MAX_BYTES:
        raise TreeError(
            f"{place}: commit {sha[:12]}: found {len(blobs)} files of {size} bytes; allowed: {MAX_FILES} files, {MAX_BYTES} bytes"
        )
    for (path, mode, _), data in zip(blobs, _blobs(repository, [blob for _, _, blob in blobs], place), strict=True):
        if mode == "120000":
            tree[path] = Link(data.decode("utf-8", "surrogateescape"))
        else:
            tree[path] = File(data, mode == "100755")
    try:
        check(tree)
    except TreeError as error:
        raise TreeError(f"{place}: commit {sha[:12]}: {error}") from None
    return tree


def resolve(repository: Path, commit: str, place: Path | None = None) -> str:
    """Return the full name of a commit, a branch or a tag. Raises TreeError."""
    place = place or repository
    try:
        found = _git(
            repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}", place=place
        )
    except TreeError:
        hint = ". It is a shallow clone: `git fetch --unshallow` brings the others" if _shallow(repository) else ""
        raise TreeError(
            f"{place}: found no commit {commit!r:.80}; allowed: a commit, tag or branch that it holds{hint}"
        ) from None
    return found.decode().strip()


def _shallow(repository: Path) -> bool:
    return (repository / ".git" / "shallow").exists() or (repository / "shallow").exists()


@dataclass(frozen=True, slots=True)
class Commit:
    """`parent`: the only one, or the first."""

    sha: str
    parent: str
    message: str


def history(repository: Path, commit: str = "HEAD", most: int = 1000) -> list[Commit]:
    """Return the commits that lead to one, the newest first, along first parents. The first of all and merges are left out.
    Raises TreeError."""
    sha = resolve(repository, commit)
    arguments = ("log", "--first-parent", "--no-merges", f"--max-count={most}", "--format=%H%x00%P%x00%B%x1e", sha)
    found = []
    for entry in _git(repository, *arguments, place=repository).decode(errors="replace").split("\x1e"):
        if entry.strip():
            own, parents, message = entry.strip().split("\0", 2)
            if parents:
                found.append(Commit(own, parents.split()[0], message.strip()))
    return found


def touched(repository: Path, commit: Commit) -> list[str]:
    """Return the paths that a commit changes. Raises TreeError."""
    arguments = ("diff-tree", "-r", "-z", "--name-only", "--no-renames", commit.parent, commit.sha)
    return [
        path.decode(errors="replace") for path in _git(repository, *arguments, place=repository).split(b"\0") if path
    ]


def _blobs(repository: Path, names: list[str], place: Path) -> Iterator[bytes]:
    answers = _git(
        repository, "cat-file", "--batch", place=place, given="".join(f"{name}\n" for name in names).encode()
    )
    at = 0
    for name in names:
        end = answers.find(b"\n", at)
        head = answers[at:end].split()
        if len(head) != 3:
            raise TreeError(f"{place}: object {name[:12]} is missing (a shallow or partial clone?)")
        size = int(head[2])
        yield answers[end + 1 : end + 1 + size]
        at = end + 1 + size + 1


def _git(repository: Path, *arguments: str, place: Path, given: bytes = b"") -> bytes:
    """Run git on a repository and return what it wrote. Raises TreeError with git's own reason."""
    command = ["git", "-C", str(repository), "-c", "safe.directory=*", "-c", "core.fsmonitor=false"]
    command += ["-c", f"core.hooksPath={_NULL}", "-c", "protocol.allow=never", "-c", "protocol.file.allow=always"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | _ENVIRONMENT
    try:
        done = subprocess.run(
            [*command, *arguments], input=given, capture_output=True, env=environment, timeout=_GIT_S, check=False
        )
    except FileNotFoundError:
        raise TreeError(f"{place}: needs the program git, which is not installed here") from None
    except subprocess.TimeoutExpired:
        raise TreeError(f"{place}: git {arguments[0]} took more than {_GIT_S:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        if _LACKS in said:
            raise TreeError(
                f"{place}: the bundle builds on commits that it does not hold: {' '.join(_COMMITS.findall(said))[:300]}; "
                "allowed: a bundle with all of its history: `git bundle create FILE BRANCH`"
            )
        reason = said.split("\n")[-1]
        raise TreeError(f"{place}: git {arguments[0]} refused: {reason[:300]}")
    return done.stdout
