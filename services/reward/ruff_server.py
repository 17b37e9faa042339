"""Issues that ruff finds in Python texts, from one ruff server that stays: to start ruff costs more than to check a file.

Invariants
- A check takes TIME_S at most, and the server never outlives this process.
- No text can turn a rule off: comments for ruff are masked before it reads them, and it reads no configuration.
- A failed server is ended, and the next check starts another one. No answer of one text is taken for another's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import select
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from shared.process import end_with, kill

RULES = "E4,E7,E9,F,W,B,PLE"
TIME_S = 2.0  # all texts of one attempt
START_S = 30.0
CHECKS = 2000  # of one server; then it is replaced, so that its memory does not grow for ever
REMEMBERED = 512  # texts: attempts at one problem begin with the same files
_FOLDER = "file:///etude-style-does-not-exist"
# Words that make a comment one for ruff, such as noqa alone or after ruff and a colon, and what may stand for their letters.
_WORDS = ("noqa", "ruff")
_PRAGMA = re.compile("|".join(_WORDS), re.IGNORECASE)
_STANDS_FOR = ("qzxw", "xqzj", "zjqx", "wqxz", "jzwq", "kzqj", "qjkz", "zkxq")

Issue = tuple[int, str, str]  # line, rule, message


class Unavailable(Exception):
    """Ruff gave no answer; the text says why."""


@dataclass(slots=True)
class Asked:
    """Texts that ruff checks now. `names`: their checksums, in order. `known`: the issues of those that it checked before.
    `requests`: the request's number of each other one, and the words to put back into its answer. `left_s`: of the time limit."""

    names: list[bytes]
    known: dict[bytes, list[Issue]]
    requests: dict[bytes, tuple[int, dict[str, str]]] = field(default_factory=dict)
    left_s: float = TIME_S


class RuffServer:
    """Not thread-safe. Starts with the first check."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._answers: dict[int, dict[str, Any]] = {}  # by the request's number
        self._numbers = itertools.count()
        self._left = 0
        self._known: dict[bytes, list[Issue]] = {}

    def issues(self, texts: Iterable[str]) -> list[list[Issue]]:
        """Return the issues of each text, in the order of their places. Raises Unavailable."""
        return self.answers(self.ask(texts))

    def ask(self, texts: Iterable[str]) -> Asked:
        """Have ruff check all texts that are not known, side by side, while the caller does something else. `answers` takes what
        it finds. Raises Unavailable."""
        with self._ended_by_trouble():
            return self._asked(list(texts), time.monotonic() + TIME_S)

    def answers(self, asked: Asked) -> list[list[Issue]]:
        """Return the issues of each text that was asked for. The time limit counts the two calls, not the time between them. Raises
        Unavailable."""
        with self._ended_by_trouble():
            return self._answered(asked, time.monotonic() + asked.left_s)

    def start(self) -> None:
        """Start the server, which may take seconds on a busy machine. Raises Unavailable, OSError."""
        self._start(time.monotonic() + START_S)

    def close(self) -> None:
        if self._process is not None:
            kill(self._process)
        self._process = None
        self._buffer.clear()
        self._answers.clear()

    @contextlib.contextmanager
    def _ended_by_trouble(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError, Unavailable) as error:
            self.close()
            raise Unavailable(f"ruff: {type(error).__name__}: {error}"[:200]) from None

    def _asked(self, texts: list[str], deadline: float) -> Asked:
        data = [text.encode("utf-8", "replace") for text in texts]
        names = [xxhash.xxh3_128_digest(one) for one in data]
        asked = Asked(names, {name: self._known[name] for name in names if name in self._known})
        unknown = {name: one for name, one in zip(names, data, strict=True) if one and name not in asked.known}
        if unknown:
            self._start(deadline)
            frames = []
            for name, one in unknown.items():
                masked, words = _masked(one.decode())
                number = next(self._numbers)
                asked.requests[name] = number, words
                frames.append(_check(number, masked))
            self._left -= len(frames)
            self._write(b"".join(frames), deadline)  # at once: each write wakes ruff, which may take our core
        asked.left_s = deadline - time.monotonic()
        return asked

    def _answered(self, asked: Asked, deadline: float) -> list[list[Issue]]:
        for name, (number, words) in asked.requests.items():
            items = self._answer(number, deadline)["items"]
            asked.known[name] = self._known[name] = [_issue(item, words) for item in sorted(items, key=_place)]
        while len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        return [asked.known.get(name, []) for name in asked.names]  # an empty text has none

    def _start(self, deadline: float) -> None:
        if self._process is not None and self._process.poll() is None and self._left > 0:
            return
        self.close()
        ruff = shutil.which("ruff") or shutil.which("ruff", path=sysconfig.get_path("scripts"))
        if ruff is None:
            raise Unavailable("it is not installed here (pip install 'etude[style]')")
        self._process = subprocess.Popen(
            [ruff, "server", "--isolated"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            preexec_fn=end_with(os.getpid()),
        )
        self._left = CHECKS
        os.set_blocking(self._pipe(self._process.stdin), False)
        lint = {"select": RULES.split(","), "preview": False}
        settings = {
            "configurationPreference": "editorOnly",
            "lint": lint,
            "showSyntaxErrors": True,
            "logLevel": "error",
        }
        able: dict[str, Any] = {"textDocument": {"diagnostic": {}}}
        wanted = {
            "processId": None,
            "rootUri": None,
            "capabilities": able,
            "initializationOptions": {"settings": settings},
        }
        self._answer(self._ask("initialize", wanted, deadline), deadline)
        self._write(_notice("initialized", {}), deadline)

    def _ask(self, method: str, params: dict[str, Any], deadline: float) -> int:
        """Send a request and return its number."""
        number = next(self._numbers)
        self._write(_framed({"id": number, "method": method, "params": params}), deadline)
        return number

    def _answer(self, number: int, deadline: float) -> Any:
        """Return the result of a request. What the server asks or says meanwhile gets an empty answer. Raises Unavailable."""
        while number not in self._answers:
            message = self._message(deadline)
            if "method" not in message:
                self._answers[message["id"]] = message
            elif "id" in message:
                self._write(_framed({"id": message["id"], "result": None}), deadline)
        message = self._answers.pop(number)
        if "error" in message:
            raise Unavailable(f"it refused a request: {message['error'].get('message')}")
        return message["result"]

    def _write(self, frames: bytes, deadline: float) -> None:
        """Write all of it, and take what the server says meanwhile: it may read nothing more before somebody reads that."""
        assert self._process is not None
        data, pipe, answers = memoryview(frames), self._pipe(self._process.stdin), self._pipe(self._process.stdout)
        while data:
            if answers in _wait({pipe: select.POLLOUT, answers: select.POLLIN}, deadline):
                self._read(deadline)
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(pipe, data) :]

    def _message(self, deadline: float) -> dict[str, Any]:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            self._read(deadline)
        fields = dict(line.lower().split(b":", 1) for line in bytes(self._buffer[:end]).split(b"\r\n"))
        size = end + 4 + int(fields[b"content-length"])
        while len(self._buffer) < size:
            self._read(deadline)
        message = msgspec.json.decode(bytes(self._buffer[end + 4 : size]))
        del self._buffer[:size]
        return dict(message)

    def _read(self, deadline: float) -> None:
        assert self._process is not None
        pipe = self._pipe(self._process.stdout)
        _wait({pipe: select.POLLIN}, deadline)
        if not (part := os.read(pipe, 1 << 16)):
            raise Unavailable("its server ended")
        self._buffer += part

    @staticmethod
    def _pipe(pipe: Any) -> int:
        return int(pipe.fileno())


@functools.cache
def shared_server() -> RuffServer:
    """Return the server of this process."""
    return RuffServer()


def _check(number: int, text: str) -> bytes:
    """Return a request for a text's issues, with the notices that open and close it as a document."""
    document = {"uri": f"{_FOLDER}/{number}.py"}
    opened = {"languageId": "python", "version": 1, "text": text}
    return (
        _notice("textDocument/didOpen", {"textDocument": document | opened})
        + _framed({"id": number, "method": "textDocument/diagnostic", "params": {"textDocument": document}})
        + _notice("textDocument/didClose", {"textDocument": document})
    )


def _framed(message: dict[str, Any]) -> bytes:
    body = msgspec.json.encode({"jsonrpc": "2.0", **message})
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def _notice(method: str, params: dict[str, Any]) -> bytes:
    return _framed({"method": method, "params": params})


def _wait(pipes: Mapping[int, int], deadline: float) -> set[int]:
    """Return which pipes are ready for their event. Raises Unavailable where none is before the deadline."""
    poll = select.poll()
    for pipe, event in pipes.items():
        poll.register(pipe, event)
    left = deadline - time.monotonic()
    if left <= 0 or not (ready := poll.poll(left * 1000)):
        raise Unavailable(f"no answer within {TIME_S:g} s")
    return {pipe for pipe, _ in ready}


def _masked(text: str) -> tuple[str, dict[str, str]]:
    """Return the text with the words that make comments for ruff replaced by others of equal length, and the words by their
    replacements, for messages that quote names. Raises Unavailable where every replacement stands in the text."""
    lower = text.lower()
    if not any(word in lower for word in _WORDS):
        return text, {}
    words = {word.lower() for word in _PRAGMA.findall(text)}
    free = [stand for stand in _STANDS_FOR if stand not in lower]
    if len(free) < len(words):
        raise Unavailable("the text holds every word that could stand for a comment's")
    stands = dict(zip(sorted(words), free, strict=False))
    return _PRAGMA.sub(lambda found: _cased(stands[found[0].lower()], found[0]), text), {
        v: k for k, v in stands.items()
    }


def _cased(word: str, like: str) -> str:
    return "".join(a.upper() if b.isupper() else a for a, b in zip(word, like, strict=True))


def _place(item: dict[str, Any]) -> tuple[int, int, str]:
    start = item["range"]["start"]
    return start["line"], start["character"], str(item.get("code"))


def _issue(item: dict[str, Any], words: dict[str, str]) -> Issue:
    message = str(item["message"]).partition("\n\nhelp: ")[0]
    for stand, word in words.items():
        for said in set(re.findall(stand, message, re.IGNORECASE)):
            message = message.replace(said, _cased(word, said))
    return item["range"]["start"]["line"] + 1, str(item.get("code") or "E9"), message
