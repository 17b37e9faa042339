"""The folder that every sandbox of a repository sees besides the system: a Python, pytest, and our programs of `inside`.

The folder is made once per machine and mounted read-only. Nothing else of the project's environment is in it, so that no
task finds a released copy of the very package that it repairs.

Invariants:
- The sandbox's user can reach the folder: below a home directory that is closed to others it is made in /tmp instead.
- A folder with missing files is never used. It is made again under another name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

from shared.environments.repository import inside, toolchains
from shared.environments.repository.problem import folder_of
from shared.sandbox import SandboxUnavailable
from shared.sandbox.bubblewrap import interpreter, shared_libraries
from shared.sandbox.contract import WORKSPACE, Base

HOME = "/opt/etude"
SITE = f"{HOME}/site"
FILES, GRADER = f"{HOME}/inside/files.py", f"{HOME}/inside/grader.py"
# pytest and what it imports. A task that needs more has it in its tree.
DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
_LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "ensurepip",
    "test",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "config-*",
    "*.a",
)
_OWNED = ("pluggy", "iniconfig", "packaging", "pygments")
_SOURCES = ("src", "lib")  # folders of a tree that hold packages, besides its root
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
_MANIFEST = "manifest.json"


def python(image: str = "") -> str:
    """Return the interpreter of a sandbox: a path that is the same outside and inside, or that of the image by its name."""
    return "python3" if image else str(interpreter())


def base(cache: Path, tree: Path | None, workdir: str, image: str = "") -> Base:
    """Return what a sandbox begins with: the tree (None: nothing) and the runtime. `workdir`: the folder of the tree that
    imports are found from. `image`: the root file system, which brings its own Python; empty: the host's programs and this
    service's Python. Raises SandboxUnavailable, OSError."""
    here = made(cache)
    mounts = [(here, HOME)]
    if not image:
        if (here / "python").is_dir():
            mounts.append((here / "python", sys.base_prefix))
        mounts += [(here / "empty", folder) for folder in _packages()]
        mounts += toolchains.mounts()
    paths = import_paths(workdir)
    environment = {
        "PATH": ":".join(
            (f"{HOME}/{'tools' if image else 'bin'}", *toolchains.programs(image), "/usr/local/bin:/usr/bin:/bin")
        ),
        "PYTHONPATH": ":".join([*paths, SITE] if tree is not None and own(tree, workdir) else [SITE, *paths]),
        "PYTHONHASHSEED": "0",  # the order of sets of strings is the same in every run
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HOME": "/tmp",
    }
    return Base(image, tree, tuple(mounts), environment, WORKSPACE)


def import_paths(workdir: str) -> list[str]:
    """Return the folders, inside, that a tree's packages are imported from."""
    folder = folder_of(workdir)
    return [folder, *(f"{folder}/{name}" for name in _SOURCES)]


def own(tree: Path, workdir: str) -> list[str]:
    """Return those of pytest's dependencies that the tree contains, e.g. ['packaging']: its tests must import the tree's copy."""
    folders = [tree / workdir, *(tree / workdir / name for name in _SOURCES)]
    return [
        name
        for name in _OWNED
        if any((folder / name).is_dir() or (folder / f"{name}.py").is_file() for folder in folders)
    ]


def _packages() -> list[str]:
    """Return the folders of installed packages that a sandbox would see below /usr."""
    library = sysconfig.get_path("stdlib")
    folders = (f"{library}/site-packages", f"{library}/dist-packages", "/usr/lib/python3/dist-packages")
    return [folder for folder in folders if folder.startswith("/usr/") and os.path.isdir(folder)]


def made(cache: Path) -> Path:
    """Return the folder of Python, pytest and our programs that sandboxes mount. Make it where there is no complete one
    below `cache`. Raises SandboxUnavailable, OSError."""
    parent = _reachable(cache.absolute() / "runtime")
    try:
        name = _digest()
    except metadata.PackageNotFoundError as error:
        raise SandboxUnavailable(
            f"found no package {error.name!r} here; install Étude's extra 'environments'"
        ) from None
    for attempt in range(100):  # a cleaner of /tmp may have taken files out of the first
        folder = parent / f"{name}-{attempt}"
        if not folder.exists():
            _make(folder)
        if _whole(folder):
            return folder
    raise SandboxUnavailable(f"{parent}: found 100 damaged runtimes {name}-*; remove them")


def _reachable(folder: Path) -> Path:
    """Return the folder, made, or one in the directory for temporary files where the sandbox's user could not reach it."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or all(stat.S_IMODE(one.stat().st_mode) & 0o005 == 0o005 for one in (folder, *folder.parents)):
        return folder
    other = Path(tempfile.gettempdir()) / f"etude-runtime-{os.geteuid()}"
    other.mkdir(mode=0o755, exist_ok=True)
    found = other.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise SandboxUnavailable(
            f"{other}: found a folder of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}; allowed: our own, which "
            "others cannot write; remove it"
        )
    return other


def _digest() -> str:
    parts = [sys.version, sys.base_prefix, python(), str(_ripgrep())]
    parts += [f"{name} {metadata.version(name)}" for name in DISTRIBUTIONS]
    parts += [path.read_text() for path in (Path(__file__), *sorted(Path(inside.__file__).parent.glob("*.py")))]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _make(folder: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        _fill(draft)
        files = {
            str(path.relative_to(draft)): path.lstat().st_size for path in sorted(draft.rglob("*")) if _is_file(path)
        }
        (draft / _MANIFEST).write_text(json.dumps(files))
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _whole(folder: Path) -> bool:
    try:
        files = json.loads((folder / _MANIFEST).read_text())
        return all((folder / path).lstat().st_size == size for path, size in files.items())
    except (OSError, ValueError):
        return False


def _is_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _fill(draft: Path) -> None:
    _site(draft / "site")
    shutil.copytree(Path(inside.__file__).parent, draft / "inside", ignore=shutil.ignore_patterns("__pycache__"))
    (draft / "empty").mkdir()
    programs = draft / "bin"
    programs.mkdir()
    for name in ("python", "python3"):
        (programs / name).symlink_to(python())
    (draft / "tools").mkdir()  # the rest of `bin` is of no use to an image, which has a Python of its own
    for folder, name in ((programs, "python"), (draft / "tools", "python3")):
        (folder / "pytest").write_text(f'#!/bin/sh\nexec {name} -m pytest "$@"\n')
        (folder / "pytest").chmod(0o755)
    if ripgrep := _ripgrep():
        shutil.copy(ripgrep, programs / "rg")
    if not python().startswith(_SYSTEM):
        _interpreter(draft / "python")
    for where, _, _ in os.walk(draft):
        os.chmod(where, 0o755)


def _site(folder: Path) -> None:
    for name in DISTRIBUTIONS:
        for file in metadata.files(name) or ():
            source, target = Path(str(file.locate())), folder / str(file)
            if ".." in file.parts or "__pycache__" in file.parts or not source.is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    # Compile the modules that pytest imports, once, here: inside, bytecode cannot be written. pytest never imports the hundreds of
    # other modules of Pygments.
    import compileall

    unused = re.compile(r"pygments/(lexers|styles|formatters)/(?!(__init__|_mapping|diff|python|terminal)\.py)")
    compileall.compile_dir(folder, quiet=2, stripdir=str(folder), prependdir=SITE, rx=unused)


def _interpreter(folder: Path) -> None:
    """Copy the interpreter, its standard library and the shared libraries that lie with it."""
    prefix, binary, library = Path(sys.base_prefix), interpreter(), Path(sysconfig.get_path("stdlib"))
    shutil.copytree(
        library, folder / library.relative_to(prefix), symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT)
    )
    extensions = [str(path) for path in sorted((library / "lib-dynload").glob("*.so"))]
    for path in (str(binary), *shared_libraries((str(binary), *extensions))):
        if path.startswith(f"{prefix}/"):
            target = folder / Path(path).relative_to(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def _ripgrep() -> str | None:
    """Return the path of ripgrep, of the environment or the system, or None."""
    beside = Path(sys.executable).with_name("rg")
    return str(beside) if beside.is_file() else shutil.which("rg")
