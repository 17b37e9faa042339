"""Runs a project's own tests with pytest inside a sandbox, again and again, and reports what each test did.

The first line of standard input says what to collect; each further line asks for one run. Every run happens in a child that
is forked after collection, so nothing is imported or collected twice, and no run sees what another one left in memory. A run
may replace the code of functions first: a candidate bug costs a fork and the tests that call the function.

The answers are only a search for candidates. Code under test shares the process and may lie: what is found here goes through
the real grader in fresh sandboxes before it becomes a problem.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import gc
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

_NUMBER = 200  # of our own descriptors: above what programs use
_SPARE_BYTES = 2 << 30  # that one run may allocate over what is there
_TRACED_CALLS = 40  # of one function in one test, whose lines are looked at; later calls only count
_SHOWN = 300  # characters of an error
_HEARD = 64 << 20  # bytes of one run's report


class TookTooLong(BaseException):
    """A test went past its own limit."""


def main() -> None:
    asked, told = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _NUMBER) for number in (0, 1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open("/tmp/.runs.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    os.dup2(1, 2)
    server = Server(os.fdopen(asked, "rb"), told)
    request = server.next_request()
    if request is None:
        return
    sys.path.insert(0, request["inside"])
    import grader

    del sys.path[0]
    grader.prepare(request["site"], request["paths"])
    import pytest

    if request["own"]:
        grader.give_way(request["site"], request["paths"], request["own"])
    options = ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "required_plugins=", "-q", "--tb=no"]
    files = {path: number for number, path in enumerate(request["files"])}
    plugin = make_plugin(pytest, server, files)
    try:
        status = int(pytest.main([*options, f"--rootdir={request['root']}", *request["tests"]], plugins=[plugin]))
    except BaseException as error:
        server.say({"failed": f"{type(error).__name__}: {error!s:.{_SHOWN}}"})
        raise
    if not plugin.served:
        server.say({"failed": f"pytest ended with status {status} before it collected anything"})


class Server:
    def __init__(self, asked: Any, told: int) -> None:
        self._asked, self._told = asked, told

    def next_request(self) -> Any:
        """Return the next request. None: there are no more."""
        line = self._asked.readline()
        return json.loads(line) if line else None

    def say(self, answer: Any) -> None:
        self.forward(json.dumps(answer).encode() + b"\n")

    def forward(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._told, data) :]


def make_plugin(pytest: Any, server: Server, files: dict[str, int]) -> Any:
    from _pytest.runner import runtestprotocol

    class Plugin:
        def __init__(self) -> None:
            self.errors: list[dict[str, str]] = []
            self.served = False

        @pytest.hookimpl
        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                said = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr).strip()
                last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
                self.errors.append({"file": report.nodeid, "said": last.removeprefix("E").strip()[:_SHOWN]})

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
            report = yield
            if call.excinfo is not None:
                report.kinds = [kind.__name__ for kind in call.excinfo.type.__mro__[:-1]]
                report.said = f"{call.excinfo.value!s:.{_SHOWN}}"
            return report

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self, session: Any) -> bool:
            self.served = True
            functions = indexed(files)
            server.say({"collected": [item.nodeid for item in session.items], "errors": self.errors})
            items = {item.nodeid: item for item in session.items}
            gc.collect()
            gc.freeze()
            while (request := server.next_request()) is not None:
                forked(server, request["time_s"], partial(run, request, items, functions))
            return True

    def run(request: dict[str, Any], items: dict[str, Any], functions: Index, say: Callable[[Any], None]) -> None:
        for edit in request["edits"]:
            if why := patched(edit, functions):
                say({"unpatchable": why})
                return
        chosen = [items[name] for name in request["tests"] if name in items]
        limits = dict(zip(request["tests"], request["each_s"], strict=True))
        tracer = Tracer(files) if request["trace"] else None
        for number, item in enumerate(chosen):
            following = chosen[number + 1] if number + 1 < len(chosen) else None
            with limited(limits[item.nodeid]), tracer or contextlib.nullcontext():
                started = time.monotonic()
                try:
                    found = summary(runtestprotocol(item, log=False, nextitem=following))
                except TookTooLong:
                    found = {"outcome": "failed", "phase": "", "kinds": ["TookTooLong"], "said": ""}
                found |= {"test": item.nodeid, "s": time.monotonic() - started}
            if tracer is not None:
                found["functions"] = tracer.taken()
            say(found)
            if (
                found["outcome"] == "failed"
                and request["ends_at"]
                and not {*request["ends_at"]}.isdisjoint(found["kinds"])
            ):
                return
        if tracer is not None:
            say({"lines": {number: sorted(lines) for number, lines in tracer.lines.items()}})

    return Plugin()


def summary(reports: list[Any]) -> dict[str, Any]:
    """Return what became of a test: the first phase that did not pass decides."""
    for report in reports:
        if report.outcome != "passed" or hasattr(report, "wasxfail"):
            outcome = "failed" if report.outcome == "failed" else "skipped"
            kinds, said = getattr(report, "kinds", []), getattr(report, "said", "")
            return {"outcome": outcome, "phase": report.when, "kinds": kinds, "said": said}
    whole = {report.when for report in reports} == {"setup", "call", "teardown"}
    return {"outcome": "passed" if whole else "skipped", "phase": "", "kinds": [], "said": ""}


@contextlib.contextmanager
def limited(seconds: float) -> Generator[None]:
    def late(*_: Any) -> None:
        raise TookTooLong(f"more than {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def forked(server: Server, time_s: float, work: Callable[[Callable[[Any], None]], None]) -> None:
    """Do the work in a child and forward what it says, then say how it ended. The child and what it started are killed at the
    limit."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.close(reader)
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + used + _SPARE_BYTES,) * 2)
            writer = fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, _NUMBER)
            write = os.write

            def say(answer: Any) -> None:
                data = json.dumps(answer).encode() + b"\n"
                while data:
                    data = data[write(writer, data) :]

            work(say)
            say({"whole": True})
        finally:
            os._exit(0)
    os.close(writer)
    ends, heard, tail = time.monotonic() + time_s, 0, b""
    while heard < _HEARD:
        ready, _, _ = select.select([reader], [], [], max(0.0, ends - time.monotonic()))
        data = os.read(reader, 1 << 16) if ready else b""
        if not data:
            break
        heard += len(data)
        whole, mark, tail = (tail + data).rpartition(b"\n")
        if mark:
            server.forward(whole + mark)
    late = time.monotonic() >= ends
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    os.waitpid(child, 0)
    server.say({"end": "late" if late else "done"})


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


Index = dict[tuple[str, int, str], list[types.FunctionType]]
"""(file, first line, name) -> the functions that were made of this code."""


def indexed(files: dict[str, int]) -> Index:
    found: Index = {}
    for one in gc.get_objects():
        if isinstance(one, types.FunctionType) and one.__code__.co_filename in files:
            code = one.__code__
            found.setdefault((code.co_filename, code.co_firstlineno, code.co_name), []).append(one)
    return found


def patched(edit: dict[str, Any], functions: Index) -> str:
    """Give a function other code. Return why that cannot be; empty: it is done."""
    place = (edit["file"], edit["line"], edit["name"])
    if place not in functions:
        return "it is not loaded when the tests are collected"
    tree = ast.parse(edit["text"])
    ast.increment_lineno(tree, edit["shift"])
    code = _inner(compile(tree, edit["file"], "exec", flags=edit["flags"], dont_inherit=True), place)
    if code is None:
        return "its code was not found again"
    for function in functions[place]:
        try:
            function.__code__ = code
        except ValueError:
            return "it closes over other variables than before"
    return ""


def _inner(code: types.CodeType, place: tuple[str, int, str]) -> types.CodeType | None:
    if (code.co_filename, code.co_firstlineno, code.co_name) == place:
        return code
    inner = (_inner(one, place) for one in code.co_consts if isinstance(one, types.CodeType))
    return next((one for one in inner if one is not None), None)


class Tracer:
    """Notes which functions of the project a test calls, and which lines run at all."""

    def __init__(self, files: dict[str, int]) -> None:
        self._files = files
        self._calls: dict[types.CodeType, int] = {}
        self.lines: dict[int, set[int]] = {}

    def __enter__(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def taken(self) -> list[tuple[int, int]]:
        """Return (number of the file, first line) of each function called since the last time."""
        found = sorted({(self._files[code.co_filename], code.co_firstlineno) for code in self._calls})
        self._calls.clear()
        return found

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        number = self._files.get(code.co_filename)
        if number is None:
            return None
        calls = self._calls[code] = self._calls.get(code, 0) + 1
        if calls > _TRACED_CALLS:
            return None
        lines = self.lines.setdefault(number, set())

        def line(frame: Any, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line


if __name__ == "__main__":
    main()
