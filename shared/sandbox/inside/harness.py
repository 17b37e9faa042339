"""Runs one candidate on its inputs and writes one line per call. Lives inside the sandbox, in the candidate's process.

Nothing here is trusted by the outside: the candidate shares the process and can write any line itself. That gains it
nothing: lines are values or errors, expected outputs are not here, and the outside compares.

Every call gets freshly decoded arguments and freshly executed source, so that one call cannot change the next through
globals or default arguments. The timer of a call counts processor time: a busy machine never turns a right answer into
a Timeout; sleeping is bounded by the wall-clock deadline of the run, which the nursery holds.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
import types
from collections.abc import Sequence
from typing import Any

from shared.problems import values

GIVEN = ("math", "re", "string", "itertools", "functools", "collections", "operator", "bisect", "heapq")
TIMEOUT_EXIT = 124  # the candidate swallowed the timeout again and again
_SWALLOWED = 3

_given = {name: __import__(name) for name in GIVEN}
# Bound now: the candidate may replace them in their modules.
_write, _exit, _setitimer = os.write, os._exit, signal.setitimer
_CANDIDATE, _Module = "candidate", types.ModuleType
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


class Timeout(BaseException):
    """Not an Exception: candidates often catch those."""


class _OriginBlocker:
    """First on sys.meta_path: the forbidden modules and everything below them do not exist."""

    def __init__(self, tops: frozenset[str]) -> None:
        self.tops = tops

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if belongs(fullname, self.tops):
            raise ModuleNotFoundError(f"No module named {fullname!r}")


def belongs(module: str, forbidden: frozenset[str]) -> bool:
    """Whether a module lies in a forbidden top-level package or is the C half of one (`_json` of `json`)."""
    top = module.partition(".")[0]
    return top in forbidden or top.removeprefix("_") in forbidden


def withdraw() -> None:
    """Takes the project out of what can be imported or named; the nursery does it once, for every child. Its modules hold
    references to the standard library, and with them to what `forbid` takes away. Running code needs no name."""
    project = __name__.partition(".")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == project]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # it was the nursery


def forbid(names: Sequence[str]) -> dict[str, types.ModuleType]:
    """Takes the origin out of the interpreter: imports, loaded modules under whatever name (`os.path` is `posixpath`), and where
    other modules name them or their functions. Returns what of GIVEN is left. What the interpreter carries can still be
    found by who looks for it: see docs/sandboxes.md, What remains."""
    if not names:
        return _given
    tops = frozenset(name.partition(".")[0] for name in names)
    sys.meta_path.insert(0, _OriginBlocker(tops))
    found = {name: m for name, m in sys.modules.items() if belongs(name, tops) or belongs(m.__name__, tops)}
    for name in found:
        del sys.modules[name]
        _given.pop(name, None)
    # By the names that a thing is usually bound to; looking at every value would copy every page of the interpreter.
    usual: dict[tuple[str, int], Any] = {}
    for name, module in found.items():
        own = [
            (n, v) for n, v in vars(module).items() if isinstance(v, _FUNCTIONS) and belongs(v.__module__ or "", tops)
        ]
        for alias, value in ((name.rpartition(".")[2], module), *own):
            usual |= {(alias, id(value)): value, (f"_{alias}", id(value)): value}
    for owner in list(sys.modules.values()):
        scope = vars(owner)
        for (alias, _), value in usual.items():
            if scope.get(alias) is value:
                del scope[alias]
    return _given


def _late(_: int, frame: Any) -> None:
    _late.fired += 1  # type: ignore[attr-defined]
    if _late.fired >= _SWALLOWED:  # type: ignore[attr-defined]
        _exit(TIMEOUT_EXIT)
    raise Timeout


def serve(request: dict[str, Any], out: int) -> None:
    """Write one line to `out` per call: `v<text>` of the returned value, `c<text>` of an argument changed in place, or
    `e<name of the exception>`."""
    given = forbid(request["forbidden"])
    entry, call_s = request["entry"], request["call_s"]
    signal.signal(signal.SIGPROF, _late)
    code: types.CodeType | None = None
    for text in request["args"]:
        _late.fired = 0  # type: ignore[attr-defined]
        try:
            # Again and again after the first: a candidate may swallow the exception once.
            _setitimer(signal.ITIMER_PROF, call_s, call_s)
            if code is None:
                code = compile(request["source"], "<candidate>", "exec", dont_inherit=True)
            line = _call(code, entry, text, given)
        except BaseException as error:
            line = "e" + type(error).__name__.replace("\n", " ")
        finally:
            _setitimer(signal.ITIMER_PROF, 0)
        _write(out, line.encode("ascii", "replace") + b"\n")
        if line[0] == "e" and request["stop_at_error"]:
            return


def _call(code: types.CodeType, entry: str, text: str, given: dict[str, types.ModuleType]) -> str:
    module = _Module(_CANDIDATE)
    sys.modules[_CANDIDATE] = module  # dataclasses, pickle and typing look there for the names that a class knows
    scope = vars(module)
    scope |= {"__builtins__": builtins, **given}
    exec(code, scope)  # noqa: S102 that is what this process is for
    if entry not in scope:
        raise NameError(entry)
    args = values.decode(text)
    result = scope[entry](*args)
    try:
        outcome, changed = values.outcome(result, args, lambda: values.decode(text))
    except ValueError:
        raise Unprintable from None
    return ("c" if changed else "v") + outcome


class Unprintable(Exception):
    """The result is no plain value, or too large a one."""


def warm() -> None:
    """Touches every path that a run takes, so that the children share its pages and find its imports done."""
    request = {"forbidden": [], "entry": "f", "call_s": 1.0, "stop_at_error": False, "args": ['[[1, 2.5, "a"]]']}
    source = "def f(x):\n    y = {k: v for v, k in enumerate(sorted(map(str, x)))}\n    return [(y, {1}), None]\n"
    sink = os.open("/dev/null", os.O_WRONLY)
    for text in (source, source.replace("return", "raise KeyError")):
        serve(json.loads(json.dumps({**request, "source": text})), sink)
    os.close(sink)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
