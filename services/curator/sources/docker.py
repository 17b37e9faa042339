"""Reads a Dockerfile without building it, and returns the files that it copies. Refuses, by line, any instruction that would need
an image or is not understood. Where the image was built already, only what it copies into the working directory matters."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path, PurePosixPath

from services.curator.sources import Refused
from services.curator.sources.lines import continued
from shared.environments.repository.trees import File, Link, from_folder

# Images whose programs a sandbox has as well: a shell, the usual tools, Python.
_PLAIN = re.compile(r"(docker\.io/)?(library/)?(python|ubuntu|debian)(:[\w.-]+)?(@sha256:[0-9a-f]+)?\Z")
# What images install for Harbor itself, not for the task.
_HARNESS = {"asciinema", "ca-certificates", "curl", "git", "procps", "pytest", "pytest-json-ctrf", "tmux", "uv"}
_HERE = {"bash", "coreutils", "python3", "python-is-python3"}  # what a sandbox has as well
_VARIABLES = re.compile(r"(PYTHON(DONTWRITEBYTECODE|UNBUFFERED)|PIP_\w+|DEBIAN_FRONTEND|LANG|LC_ALL|TZ)\Z")
_IGNORED = ("LABEL", "EXPOSE", "STOPSIGNAL", "MAINTAINER", "SHELL")
# A shell, or a program that only waits; words joined by blanks.
_WAITING = re.compile(r"((/bin/)?(ba)?sh( -l)?( -c)?)?( ?(sleep (infinity|\d+)|tail -f /dev/null))?\Z")
_IGNORES = (".dockerignore", "Dockerfile.dockerignore")
# Docker unpacks a file that ADD names if its content begins so: gzip, bzip2, xz, zstd; tar has its mark further on.
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
_TAR = slice(257, 262)


def built(context: Path, has_image: bool = False) -> tuple[dict[str, File | Link], str]:
    """Return the files in the working directory, and its path. `has_image`: the image was built. Raises Refused."""
    if has_image:
        return _of_image(context)
    tree: dict[str, File | Link] = {}
    place, first = "/", True
    for number, line in continued((context / "Dockerfile").read_text(errors="replace"), comments=True):
        name, _, rest = line.partition(" ")
        word = name.upper()

        def refuse(why: str, what: str = f"{word} {rest}", number: int = number) -> Refused:
            return Refused(
                f"needs an image: environment/Dockerfile, line {number}: {what:.100}: {why}; no image was given (--images)"
            )

        if not rest:
            raise refuse("is not understood; allowed: an instruction with arguments")
        if word == "FROM":
            if not first or not _PLAIN.match(rest.split()[0]):
                raise refuse("allowed: one stage, from python, ubuntu or debian")
            first = False
        elif word == "WORKDIR":
            place = str(PurePosixPath(place) / rest.strip('"'))
            if tree:
                raise refuse("comes behind COPY; allowed: before it")
        elif word in ("COPY", "ADD"):
            tree |= _copied(context, rest, place, refuse, unpacks=word == "ADD")
        elif word == "RUN":
            if not _needless(rest, place):
                raise refuse("changes the image")
        elif word in ("ENV", "ARG"):
            if not all(_VARIABLES.match(name) for name in _names(rest)):
                raise refuse("sets a variable that the task may need")
        elif word in ("CMD", "ENTRYPOINT"):
            if not _waits(rest):
                raise refuse("starts a program")
        elif word == "USER":
            if rest not in ("root", "0"):
                raise refuse("works as another user")
        elif word not in _IGNORED:
            raise refuse("is not understood")
    return tree, place


def _of_image(context: Path) -> tuple[dict[str, File | Link], str]:
    """Return the files that the last stage copies into the working directory in which it ends, and that directory. Raises
    Refused."""
    at, copies = "/", list[tuple[str, str]]()  # where a COPY begins, and its words
    for _, line in continued((context / "Dockerfile").read_text(errors="replace"), comments=True):
        name, _, rest = line.partition(" ")
        if name.upper() == "FROM":
            at, copies = "/", []
        elif name.upper() == "WORKDIR":
            at = str(PurePosixPath(at) / rest.strip('"'))
        elif name.upper() in ("COPY", "ADD") and rest and "--from=" not in rest:
            copies.append((at, rest))
    tree: dict[str, File | Link] = {}
    for began, rest in copies:
        *words, goal = rest.split()
        target = f"{PurePosixPath(began) / goal}{'/' if goal.endswith(('/', '.')) else ''}"
        if f"{target}/".startswith(f"{at.rstrip('/')}/"):  # else the image alone has it

            def refuse(why: str, what: str = rest) -> Refused:
                return Refused(f"environment/Dockerfile: COPY {what:.100}: {why}")

            tree |= _copied(context, " ".join([*words, target]), at, refuse, unpacks=False)
    return tree, at


def _copied(context: Path, rest: str, place: str, refuse, *, unpacks: bool) -> dict[str, File | Link]:  # type: ignore[no-untyped-def]
    try:
        words = shlex.split(rest)
    except ValueError:
        raise refuse("is not understood") from None
    flags = [word for word in words if word.startswith("--")]
    words = [word for word in words if not word.startswith("--")]
    if any(not flag.startswith("--chown=") for flag in flags) or len(words) < 2 or words[0].startswith("["):
        raise refuse("is not understood; allowed: files of the task's environment/")
    if ignores := [name for name in _IGNORES if (context / name).exists()]:
        raise refuse(f"leaves out the files of environment/{ignores[0]}; allowed: no such file")
    *sources, goal = words
    target = str(PurePosixPath(place) / goal)
    if target != place and not target.startswith(f"{place.rstrip('/')}/"):
        raise refuse(f"copies out of the working directory {place}")
    inside = target.removeprefix(place).strip("/")
    whole = from_folder(context)
    whole.pop("Dockerfile", None)
    copied: dict[str, File | Link] = {}
    for source in sources:
        if "://" in source or ".." in source.split("/") or any(mark in source for mark in "*?["):
            raise refuse("is not understood; allowed: names of files and folders")
        name = source.removeprefix("./").strip("/")
        under = {path.removeprefix(f"{name}/") if name not in ("", ".") else path: entry for path, entry in whole.items()
                 if name in ("", ".") or path.startswith(f"{name}/")}  # fmt: skip
        if name in whole:
            if unpacks and _is_archive(whole[name]):
                raise refuse(f"unpacks {source!r:.60}; allowed: files and folders, which it copies")
            to_folder = goal.endswith("/") or len(sources) > 1 or target == place
            under = {PurePosixPath(name).name if to_folder else "": whole[name]}
        if not under:
            raise refuse(f"found no {source!r:.60} in environment/")
        copied |= {"/".join(filter(None, (inside, path))): entry for path, entry in under.items()}
    return copied


def _is_archive(entry: File | Link) -> bool:
    return isinstance(entry, File) and (entry.data.startswith(_PACKED) or entry.data[_TAR] == b"ustar")


def _waits(rest: str) -> bool:
    """Return whether CMD or ENTRYPOINT starts only a shell, or a program that waits."""
    try:
        words = json.loads(rest) if rest.startswith("[") else rest.split()
    except (ValueError, RecursionError):
        return False
    return bool(_WAITING.match(" ".join(map(str, words))))


def _names(rest: str) -> list[str]:
    """Return the variables of `NAME=value …`, or of `NAME value`."""
    first = rest.split()[0]
    return re.findall(r"(\w+)=", rest) if "=" in first else [first]


def _needless(command: str, place: str) -> bool:
    """Return whether every part of a RUN only installs packages that Harbor itself needs, or makes the working directory."""
    return all(_needless_part(part.split(), place) for part in re.split(r"&&|;|\|\|", command) if part.strip())


def _needless_part(words: list[str], place: str) -> bool:
    plain = [word for word in words if not word.startswith("-") and word != "sudo"]
    match plain:
        case [("apt-get" | "apt"), ("update" | "clean" | "autoremove")]:
            return True
        case [("apt-get" | "apt"), "install", *packages] | [("pip" | "pip3"), "install", *packages]:
            return all(re.split(r"[=<>~\[]", package)[0] in _HARNESS | _HERE for package in packages)
        case ["rm", *paths]:
            return all(path.startswith(("/var/lib/apt", "/var/cache/apt")) for path in paths)
        case ["mkdir", *paths]:
            return all(path.rstrip("/") == place.rstrip("/") or path.startswith("/logs") for path in paths)
    return plain in (["true"], [":"])
