"""Serves the files of the sandbox to the workspace: one request in, one answer out, several at a time.

Frames on standard input and output: four bytes of length (big-endian), then JSON. A request has an `id`, `do` and
arguments; the answer has the same `id` and either `error` (a sentence) or the fields of the operation. Contents are base64.
The program lives in the sandbox, so that no path, link or race leads it to a file of the host.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import itertools
import json
import os
import queue
import re
import shutil
import stat
import struct
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

THREADS = 4
MAX_ANSWER = 64 << 20  # bytes of one answer
MAX_ENTRIES = 150_000  # of a scan; a tree has at most 100,000
SKIPPED = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".pytest_cache",
        ".mypy_cache",
        ".ruff_cache",
        ".hypothesis",
        "node_modules",
        ".tox",
    }
)
_LINE = 400  # characters of a matching line that are shown
MAX_MORE = 10_000  # matching lines that are counted beyond those
_GREP_S = 55  # the workspace waits for an answer a little longer


def read(path: str, cap: int) -> dict[str, Any]:
    with open(path, "rb", opener=_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise IsADirectoryError(f"{path} is no regular file")
        data = file.read(cap + 1)
    return {"data": _encoded(data[:cap]), "whole": len(data) <= cap}


def write(path: str, data: str) -> dict[str, Any]:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    existed = os.path.lexists(path)
    if existed and not os.path.isfile(path):
        raise IsADirectoryError(f"{path} is no regular file")
    with open(path, "wb") as file:
        file.write(base64.b64decode(data))
    return {"existed": existed}


class Refused(ValueError):
    """The changes do not fit the tree; the text says why."""


def apply(path: str, deleted: list[str], written: dict[str, list[Any]]) -> dict[str, Any]:
    """Delete and write files below a folder: written path -> [contents, executable]. `refused`: why they do not fit the tree;
    empty: they are applied."""
    try:
        change(path, deleted, {name: (base64.b64decode(data), bool(mode)) for name, (data, mode) in written.items()})
    except Refused as error:
        return {"refused": str(error)}
    return {"refused": ""}


def change(root: str, deleted: Iterable[str], written: dict[str, tuple[bytes, bool]]) -> None:
    """Delete and write files below a folder that no process uses. Deletions come first, so that a file may take a folder's place.
    Raises Refused at a path that leads through a link, or has a folder in its place; OSError."""
    for path in deleted:
        _delete(root, path)
    for path in written:
        if other := _twin(root, path):
            raise Refused(f"{path!r:.200}: differs from {other!r:.200} only in case; allowed: one of the two")
    for path, (data, executable) in written.items():
        _write_below(root, path, data, executable)


def folded(path: str) -> str:
    """Return the path as a file system sees it that does not tell case or forms of a character apart."""
    return unicodedata.normalize("NFC", path).casefold()


def _twin(root: str, path: str) -> str | None:
    """Return the first part of the path that exists in another case, or None. A link ends the search: no path leads through
    one."""
    parts = path.split("/")
    for end, part in enumerate(parts):
        folder = "/".join(parts[:end])
        if _link_above(root, f"{folder}/x" if folder else "x") is not None:
            return None
        try:
            names = os.listdir(f"{root}/{folder}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        for name in names if part not in names else ():
            if folded(name) == folded(part):
                return f"{folder}/{name}" if folder else name
    return None


def _delete(root: str, path: str) -> None:
    target = f"{root}/{path}"
    if _link_above(root, path) is not None or not os.path.lexists(target):
        return
    if os.path.isdir(target) and not os.path.islink(target):
        return  # the base has a folder there: nothing that could be deleted as a file
    os.unlink(target)
    above = os.path.dirname(path)
    while above and not os.listdir(f"{root}/{above}"):
        os.rmdir(f"{root}/{above}")
        above = os.path.dirname(above)


def _write_below(root: str, path: str, data: bytes, executable: bool) -> None:
    if link := _link_above(root, path):
        raise Refused(f"{path!r:.200}: found the link {link!r:.200} on the way; allowed: folders")
    target = f"{root}/{path}"
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise Refused(f"{path!r:.200}: found a file where its folder would be; allowed: a folder") from None
    if os.path.isdir(target) and not os.path.islink(target):
        raise Refused(f"{path!r:.200}: found a folder in its place; allowed: a file, or nothing")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), 0o755 if executable else 0o644)


def _link_above(root: str, path: str) -> str | None:
    """Return the first part of the path's folders that is a link, or None."""
    parts = path.split("/")
    for end in range(1, len(parts)):
        above = "/".join(parts[:end])
        try:
            if stat.S_ISLNK(os.lstat(f"{root}/{above}").st_mode):
                return above
        except (FileNotFoundError, NotADirectoryError):
            return None
    return None


def listing(path: str, depth: int, most: int) -> dict[str, Any]:
    """Return paths below a folder, folders with a slash, down to `depth` levels."""
    if not os.path.isdir(path):
        raise NotADirectoryError(f"{path} is no folder")
    found: list[str] = []
    more = 0
    for entry, name in _walk(path, "", depth):
        if len(found) < most:
            found.append(name + ("/" if entry.is_dir(follow_symlinks=False) else "@" if entry.is_symlink() else ""))
        else:
            more += 1
    return {"paths": found, "more": more}


def _walk(folder: str, prefix: str, depth: int) -> Iterator[tuple[os.DirEntry[str], str]]:
    for entry in sorted(os.scandir(folder), key=lambda one: one.name):
        yield entry, prefix + entry.name
        if depth > 1 and entry.is_dir(follow_symlinks=False) and entry.name not in SKIPPED:
            with contextlib.suppress(OSError):  # a folder that cannot be read is named, and its files are not
                yield from _walk(entry.path, f"{prefix}{entry.name}/", depth - 1)


def grep(pattern: str, path: str, glob: str, ignore_case: bool, most: int) -> dict[str, Any]:
    """Return matching lines as [path, number, text]. Uses ripgrep, or Python if ripgrep is not installed."""
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path} does not exist")
    if program := shutil.which("rg"):
        return _ripgrep(program, pattern, path, glob, ignore_case, most)
    try:
        wanted = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise ValueError(f"the pattern is no regular expression: {error}") from None
    return _first(_searched(wanted, path, glob), most)


def _first(lines: Iterable[tuple[str, int, str]], most: int) -> dict[str, Any]:
    """Return the first matching lines, and how many more there are: at most MAX_MORE are counted."""
    lines = iter(lines)
    matches = [(name, number, line[:_LINE]) for name, number, line in itertools.islice(lines, most)]
    return {"matches": matches, "more": sum(1 for _ in itertools.islice(lines, MAX_MORE))}


def _searched(wanted: re.Pattern[str], path: str, glob: str) -> Iterator[tuple[str, int, str]]:
    for name in _texts(path, glob):
        try:
            with open(name, "rb", opener=_nonblocking) as file:
                data = file.read(1 << 22)
        except OSError:  # ripgrep passes over it, too
            continue
        if b"\0" in data[:8192]:
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            if wanted.search(line):
                yield name, number, line


def _texts(path: str, glob: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    for entry, name in _walk(path, "", 100):
        matched = not glob or fnmatch.fnmatch(name, glob) or fnmatch.fnmatch(entry.name, glob)
        if matched and entry.is_file(follow_symlinks=False):
            yield entry.path


def _ripgrep(program: str, pattern: str, path: str, glob: str, ignore_case: bool, most: int) -> dict[str, Any]:
    """Search with ripgrep. Its output is read as it comes and its lines are cut, so that memory stays bounded."""
    arguments = [program, "--no-config", "--no-ignore", "--hidden", "--no-messages", "--sort=path", "--threads=1"]
    arguments += ["--color=never", "--no-heading", "--with-filename", "--null", "--line-number"]
    arguments += [f"--max-columns={_LINE * 4}", "--max-columns-preview"]  # bytes
    arguments += [f"--glob=!{name}" for name in sorted(SKIPPED)]
    arguments += [f"--glob={glob}"] * bool(glob) + ["--ignore-case"] * ignore_case + ["--regexp", pattern, "--", path]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        timer = threading.Timer(_GREP_S, process.kill)
        timer.start()
        try:
            found = _first(_printed(process.stdout), most)
            if found["more"] == MAX_MORE:
                process.kill()
            said = process.stderr.read().decode(errors="replace")
            process.wait()
        finally:
            timer.cancel()
            process.kill()
    if process.returncode == 2 and said and not found["matches"]:
        raise ValueError(said.removeprefix("rg: ").strip()[:400])
    if process.returncode < 0 and found["more"] < MAX_MORE:
        raise TimeoutError(f"the search was ended, {_GREP_S} s after its start at the latest")
    return found


def _printed(output: Iterable[bytes]) -> Iterator[tuple[str, int, str]]:
    """Read ripgrep's lines: path, NUL, number, colon, text. A path may hold line breaks, a text may not."""
    begun = b""
    for line in output:
        name, ended, rest = (begun + line).partition(b"\0")
        number, _, text = rest.partition(b":")
        if not ended or not number.isdigit():  # a path goes on, or a binary file matches
            begun = b"" if ended else name
            continue
        begun = b""
        yield name.decode(errors="replace"), int(number), text.decode(errors="replace").rstrip("\n")


def scan(path: str) -> dict[str, Any]:
    """Return every entry of a tree but folders: path -> [kind, digest or target, executable, bytes]; kinds: file, link, other."""
    found = dict(itertools.islice(entries(path), MAX_ENTRIES + 1))
    if len(found) > MAX_ENTRIES:
        raise ValueError(f"found more than {MAX_ENTRIES} files; allowed: at most so many")
    return {"entries": found}


def entries(root: str) -> Iterator[tuple[str, list[Any]]]:
    """Every entry below a folder but folders, sorted within each folder. Uses no recursion: a tree may be deeper than
    Python's stack."""
    waiting = _below(root, "")
    while waiting:
        name, entry = waiting.pop()
        if entry.name in SKIPPED or entry.name.endswith(".pyc"):
            continue
        try:
            name.encode()
        except UnicodeEncodeError:
            yield name.encode(errors="backslashreplace").decode(), ["other", "its name is no UTF-8", False, 0]
            continue
        if entry.is_symlink():
            yield name, ["link", os.fsencode(os.readlink(entry.path)).decode(errors="backslashreplace"), False, 0]
        elif entry.is_dir():
            waiting += _below(entry.path, f"{name}/")
        elif entry.is_file():
            with open(entry.path, "rb", opener=_nonblocking) as file:
                digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
                found = os.fstat(file.fileno())
            yield name, ["file", digest, bool(found.st_mode & 0o100), found.st_size]
        else:
            yield name, ["other", "it is a device, a pipe or a socket", False, 0]


def _below(folder: str, prefix: str) -> list[tuple[str, os.DirEntry[str]]]:
    """The entries of one folder with their paths, the last first: a stack gives them back in order."""
    found = sorted(os.scandir(folder), key=lambda one: one.name, reverse=True)
    return [(prefix + entry.name, entry) for entry in found]


OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "read": read,
    "write": write,
    "apply": apply,
    "list": listing,
    "grep": grep,
    "scan": scan,
}


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer would block the thread


def answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"id": request["id"], **OPERATIONS[request["do"]](**request["with"])}
    except OSError as error:
        text = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
        return {"id": request["id"], "error": text}
    except Exception as error:
        return {"id": request["id"], "error": str(error) or type(error).__name__}


def encoded(found: dict[str, Any]) -> bytes:
    """Return an answer as JSON, or an error in its place if it is longer than the workspace reads."""
    data = json.dumps(found).encode()
    if len(data) <= MAX_ANSWER:
        return data
    error = f"the answer is {len(data)} bytes long; allowed: at most {MAX_ANSWER}"
    return json.dumps({"id": found["id"], "error": error}).encode()


def serve(source: BinaryIO, target: BinaryIO) -> None:
    waiting: queue.Queue[dict[str, Any]] = queue.Queue()
    writing = threading.Lock()

    def work() -> None:
        while True:
            data = encoded(answer(waiting.get()))
            with writing:
                target.write(struct.pack(">I", len(data)) + data)
                target.flush()

    for _ in range(THREADS):
        threading.Thread(target=work, daemon=True).start()
    while head := source.read(4):
        waiting.put(json.loads(source.read(struct.unpack(">I", head)[0])))


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it is the same pipe as the output
    serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)
