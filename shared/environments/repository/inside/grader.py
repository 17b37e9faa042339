"""Runs hidden tests with pytest or unittest, and reports each test's result over a channel that the candidate is not told of.

The request comes on standard input: the `engine`, its `args` and root, `paths` for imports, a `nonce`, and the names of two
canaries, tests of which one must pass and one must fail. The report goes to what standard output was at the start. The
tests' own output goes to standard error. The process ends with the engine's exit status, which the report names as well.

With pytest, a test counts as passed only if our hooks saw setup, call and teardown return, and pytest's reports of all three
say so.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator
from typing import Any

PHASES = frozenset({"setup", "call", "teardown"})
# pytest imports these when it first needs them.
_LATE = (
    *("packaging.requirements", "packaging.version", "_pytest.config.findpaths", "_pytest._io.terminalwriter"),
    *("pygments.formatters.terminal", "pygments.lexers.diff", "pygments.lexers.python"),
)
# Modules of which tests may use a function to find out something about the candidate.
TRUSTED = (
    *("builtins", "random", "time", "json", "json.decoder", "json.encoder", "math", "operator", "datetime"),
    *("copy", "contextlib", "re", "itertools", "functools"),
)
_NUMBER = 200  # of the report's descriptor: above what programs use


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    channel = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _NUMBER)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    prepare(request["site"], request["paths"])
    write, leave = os.write, os._exit  # the candidate may replace them later
    request["originals"] = originals = Originals()
    status, collected, passed = (cases if request["engine"] == "unittest" else functions)(request)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    report = {"patched": sorted(originals.patched), "collected": collected, "passed": passed, "exit": status}
    data = f"\n{request['nonce']} {json.dumps(report)}\n".encode()
    while data:
        data = data[write(channel, data) :]
    leave(status)


Kept = list[tuple[str, dict[str, Any], dict[str, Any]]]
"""A module's name, its variables, and what they held at a moment."""


class Originals:
    """What modules of the standard library held before candidate code was imported. Tests rely on them: with another
    `random.randint`, a test may ask only what the candidate can answer. Tests and fixtures may replace them for themselves: what
    changes during a test is put back after it, and what stood there before it stays."""

    def __init__(self) -> None:
        self.patched: set[str] = set()
        self._kept: Kept = []
        self.add(*TRUSTED)
        self._case = importlib.import_module("unittest.case").TestCase
        self._methods = dict(vars(self._case))

    def add(self, *modules: str) -> None:
        for name in modules:
            held = vars(importlib.import_module(name))
            self._kept.append((name, held, dict(held)))

    def now(self) -> Kept:
        return [(name, held, dict(held)) for name, held, _ in self._kept]

    def restore(self, kept: Kept | None = None, users: Any = ()) -> None:
        """Put back what was there at a moment; None: before the candidate, and then what differs is noted: after a test it may be
        the test's own doing. `users`: variables of modules that may have taken what was there instead."""
        other: dict[int, Any] = {}
        for name, held, before in self._kept if kept is None else kept:
            for key, value in before.items():
                if callable(value) and held.get(key) is not value and key != "__loader__":
                    if kept is None:
                        self.patched.add(f"{name}.{key}")
                    if key in held:
                        other[id(held[key])] = value
                    held[key] = value
        for key, value in self._methods.items():
            if callable(value) and vars(self._case).get(key) is not value:
                if kept is None:
                    self.patched.add(f"TestCase.{key}")
                setattr(self._case, key, value)
        for held in users if other else ():
            for key, value in list(held.items()):
                if id(value) in other:
                    held[key] = other[id(value)]


def functions(request: dict[str, Any]) -> tuple[int, list[str], list[str]]:
    """Run pytest. Return its exit status, the tests that it collected, and those that passed."""
    gc.disable()  # nothing that an import makes is garbage, and pytest collects all of it again at its end
    import pytest

    if request["own"]:
        give_way(request["site"], request["paths"], request["own"])
    request["originals"].add("pytest", "_pytest.assertion.rewrite")
    recorder = make_recorder(pytest, request["canaries"], request["originals"])
    options = ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "required_plugins=", "-q", "--tb=line"]
    gc.freeze()
    gc.enable()
    status = int(pytest.main([*options, f"--rootdir={request['root']}", *request["args"]], plugins=[recorder]))
    passed = recorder.passed()
    # A test that failed in a subtest alone was reported as passed and as failed: nobody has changed that.
    told = [name for name, phases in recorder.reported.items() if phases == PHASES and name not in recorder.broken]
    if flipped := [name for name in told if name not in passed]:
        request["originals"].patched.add(f"the outcome of {len(flipped)} tests")
    return status, recorder.collected, passed


def cases(request: dict[str, Any]) -> tuple[int, list[str], list[str]]:
    """Run unittest's cases in the given files. Return 0 if all passed, else 1, the tests' names, and those that passed."""
    import unittest

    passing, failing = request["canaries"]
    names: dict[int, str] = {}
    modules: list[Any] = []
    suite = unittest.TestSuite()

    def passes(test: Any) -> None:
        pass

    def fails(test: Any) -> None:
        raise test.failureException(f"{failing} is not {passing}")

    def add(test: Any, path: str) -> None:
        if isinstance(test, unittest.TestSuite):
            for one in test:
                add(one, path)
        elif type(test).__module__ != "unittest.loader":  # a test that stands for an error of loading
            suite.addTest(test)
            names[id(test)] = f"{path}::{type(test).__qualname__}::{test._testMethodName}"

    for path in request["args"]:
        short = path.removeprefix(f"{request['root']}/")
        try:
            module = importlib.import_module(module_name(path, request["paths"][0]))
        except Exception:
            sys.excepthook(*sys.exc_info())
            continue
        modules.append(module)
        own = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, unittest.TestCase)]
        own = [kind for kind in own if kind.__module__ == module.__name__]
        for kind in own[:1] if not names else ():
            setattr(kind, passing, passes)
            setattr(kind, failing, fails)
        for kind in own:
            add(unittest.defaultTestLoader.loadTestsFromTestCase(kind), short)

    class Result(unittest.TextTestResult):
        def startTest(self, test: Any) -> None:
            self.before = request["originals"].now()
            super().startTest(test)

        def stopTest(self, test: Any) -> None:
            super().stopTest(test)
            request["originals"].restore(self.before)

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.good: list[str] = []
            self.bad: set[str] = set()

        def addSuccess(self, test: Any) -> None:
            super().addSuccess(test)
            self.good.append(names[id(test)])

        def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
            super().addSubTest(test, subtest, error)
            if error is not None:
                self.bad.add(names[id(test)])

    request["originals"].restore(users=list(map(vars, modules)))
    result: Any = unittest.TextTestRunner(stream=sys.stderr, resultclass=Result).run(suite)
    passed = sorted({*result.good} - result.bad)
    return int(len(passed) != len(names)), list(names.values()), passed


def module_name(path: str, folder: str) -> str:
    """Return the name to import a test file by. A folder without `__init__.py` is no package: it is searched itself."""
    parent = os.path.dirname(path)
    if path.startswith(f"{folder}/") and (parent == folder or os.path.exists(f"{parent}/__init__.py")):
        return path.removeprefix(f"{folder}/").removesuffix(".py").replace("/", ".")
    sys.path.append(parent)
    return os.path.basename(path).removesuffix(".py")


def prepare(here: str, tree: list[str]) -> None:
    """Make the tree importable behind the standard library and pytest, here and in processes that tests start."""
    import site

    site.setquit()
    site.sethelper()
    sys.path[:0] = [here]
    sys.path.extend(tree)
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *tree])


def give_way(here: str, tree: list[str], own: list[str]) -> None:
    """Let tests import the tree's version of a package that pytest also uses. pytest keeps the copy it imported."""
    for name in _LATE:
        importlib.import_module(name)
    sys.path.remove(here)
    sys.path.append(here)
    os.environ["PYTHONPATH"] = os.pathsep.join([*tree, here])
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]


def make_recorder(pytest: Any, canaries: list[str], originals: Originals) -> Any:
    passing, failing = canaries

    def passes() -> None:
        pass

    def fails() -> None:
        assert passing == failing

    class Recorder:
        def __init__(self) -> None:
            self.collected: list[str] = []
            self.returned: defaultdict[str, set[str]] = defaultdict(set)
            self.reported: defaultdict[str, set[str]] = defaultdict(set)
            self.broken: set[str] = set()

        def passed(self) -> list[str]:
            whole = [name for name, phases in self.returned.items() if phases == PHASES]
            return sorted(name for name in whole if self.reported[name] == PHASES and name not in self.broken)

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            """Put the canaries among the real tests: they have a module, fixtures and a name like any other."""
            functions = [item for item in items if isinstance(item, pytest.Function)]
            for function, name, body in functions[:1] and [
                (functions[0], failing, fails),
                (functions[-1], passing, passes),
            ]:
                module = function.getparent(pytest.Module)
                last = max(at for at, item in enumerate(items) if item.getparent(pytest.Module) is module)
                items.insert(last + 1, pytest.Function.from_parent(module, name=name, callobj=body))
            self.collected = [item.nodeid for item in items]
            originals.restore(users={id(item.module): vars(item.module) for item in functions}.values())

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_setup(self, item: Any) -> Generator[None, Any, Any]:
            result = yield
            self.returned[item.nodeid].add("setup")
            return result

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item: Any) -> Generator[None, Any, Any]:
            before = originals.now()
            try:
                result = yield
            finally:
                originals.restore(before)
            if not getattr(item, "_excinfo", None):  # where unittest's cases keep what they raised
                self.returned[item.nodeid].add("call")
            return result

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_teardown(self, item: Any) -> Generator[None, Any, Any]:
            result = yield
            self.returned[item.nodeid].add("teardown")
            return result

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.outcome == "passed" and not hasattr(report, "wasxfail"):
                self.reported[report.nodeid].add(report.when)
            else:
                self.broken.add(report.nodeid)

    return Recorder()


if __name__ == "__main__":
    main()
