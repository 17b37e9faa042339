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


def forbid(names: Sequence[str]) -> dict[str, types.ModuleType]:
    """Takes the origin out of the interpreter: imports, loaded modules, attributes of other modules. Returns what of GIVEN
    is left. A core module of the interpreter stays reachable by introspection (gc, frames): see docs/sandboxes.md."""
    if not names:
        return _given
    tops = frozenset(name.partition(".")[0] for name in names)
    sys.meta_path.insert(0, _OriginBlocker(tops))
    found = [name for name in sys.modules if belongs(name, tops)]
    if found:
        gone = {id(sys.modules.pop(name)) for name in found}
        # By the names that a module is usually bound to; looking at every value would copy every page of the interpreter.
        usual = {alias for name in found for alias in (name.rpartition(".")[2], f"_{name}")}
        for owner in list(sys.modules.values()):
            if owner is not None and owner.__name__ not in (__name__, values.__name__):
                scope = vars(owner)
                for alias in usual:
                    if id(scope.get(alias)) in gone:
                        del scope[alias]
    return {name: module for name, module in _given.items() if not belongs(name, tops)}


def _late(_: int, frame: Any) -> None:
    _late.fired += 1  # type: ignore[attr-defined]
    if _late.fired >= _SWALLOWED:  # type: ignore[attr-defined]
        _exit(TIMEOUT_EXIT)
    raise Timeout


def serve(request: dict[str, Any], out: int) -> None:
    """One line to `out` per call: `v<text>` or `e<name of the exception>`."""
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
            line = "v" + _call(code, entry, text, given)
        except BaseException as error:
            line = "e" + type(error).__name__.replace("\n", " ")
        finally:
            _setitimer(signal.ITIMER_PROF, 0)
        _write(out, line.encode("ascii", "replace") + b"\n")
        if line[0] == "e" and request["stop_at_error"]:
            return


def _call(code: types.CodeType, entry: str, text: str, given: dict[str, types.ModuleType]) -> str:
    scope: dict[str, Any] = {"__name__": "candidate", "__builtins__": builtins, **given}
    exec(code, scope)  # noqa: S102 that is what this process is for
    if entry not in scope:
        raise NameError(entry)
    args = values.decode(text)
    result = scope[entry](*args)
    try:
        return values.outcome(result, args, lambda: values.decode(text))
    except ValueError:
        raise Unprintable from None


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
