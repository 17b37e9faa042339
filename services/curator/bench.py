"""Many small runs at the price of one: sources side by side in one sandboxed run, each in a scope of its own.

A sandbox costs milliseconds, a call microseconds, and making a pack takes about a million calls. `execute` puts as many
items as fit into one run: every source becomes the body of a function, fresh for every call. `budgeted` gives a source a
budget of loop turns and calls, so that whether it counts as endless does not depend on how fast or busy the machine is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared import syntax
from shared.sandbox import CallResult, FunctionRun, Limits
from shared.sandbox.pool import FunctionPool

BUDGET = 4000  # loop turns and calls of the function itself; a real call on small inputs takes tens
ENDLESS = frozenset(["Overrun", "Timeout", "TimeoutError", "Died", "OutputLimit", "MemoryError", "NotRun"])
_CALLS_PER_RUN = 600
# Generous: the budget ends loops first, these end what happens inside one step (a power of powers).
_LIMITS = Limits(time_s=120.0, call_s=0.5, memory_mb=192, output_bytes=8 << 20)
# Kept on the one module that outlives a call: how often a source did not come to an end.
_DISPATCH = """def _run(number, patience, *args):
    import builtins
    endless = builtins.__dict__.setdefault('_endless', {})
    if endless.get(number, 0) >= patience:
        raise TimeoutError
    endless[number] = endless.get(number, 0) + 1
    try:
        result = globals()[f'_scope{number}']()(*args)
    except MemoryError:
        raise
    except Exception:
        endless[number] -= 1
        raise
    endless[number] -= 1
    return result"""

_PROLOGUE = f"""class Overrun(BaseException):
    pass
_left = [{BUDGET}]
def _turn():
    _left[0] -= 1
    if _left[0] < 0:
        raise Overrun
    return True"""


@dataclass(frozen=True, slots=True)
class Item:
    """`args`: tagged JSON texts, each a list of positional arguments."""

    source: str
    entry: str
    args: tuple[str, ...]


def execute(
    pool: FunctionPool, items: Sequence[Item], *, patience: int = 1, forbidden: tuple[str, ...] = ()
) -> list[list[CallResult]]:
    """One list of results per item, in order. An item that ends its run early costs the others nothing; one that has
    not come to an end `patience` times is not called again (TimeoutError). `forbidden`: modules that cannot be
    imported, the origin of the items."""
    results: list[list[CallResult]] = [[] for _ in items]
    waiting = list(_bundles(range(len(items)), items))
    while waiting:
        bundle = waiting.pop()
        [flat] = pool.run_sync([_run([items[index] for index in bundle], patience, forbidden)])
        position = 0
        for place, index in enumerate(bundle):
            own = flat[position : position + len(items[index].args)]
            position += len(own)
            results[index] = own
            if len(bundle) > 1 and any(result.error in ("Died", "OutputLimit", "SyntaxError") for result in own):
                waiting.append([index])  # alone, to see what is its own doing; the others go on without it
                if bundle[place + 1 :]:
                    waiting.append(bundle[place + 1 :])
                break
    return results


def _bundles(indices: Sequence[int], items: Sequence[Item]) -> Iterator[list[int]]:
    bundle: list[int] = []
    calls = 0
    for index in indices:
        if bundle and calls + len(items[index].args) > _CALLS_PER_RUN:
            yield bundle
            bundle, calls = [], 0
        bundle.append(index)
        calls += len(items[index].args)
    if bundle:
        yield bundle


def _run(items: Sequence[Item], patience: int, forbidden: tuple[str, ...]) -> FunctionRun:
    lines = []
    for number, item in enumerate(items):
        lines.append(f"def _scope{number}():")
        lines += ["    " + line for line in item.source.split("\n")]
        lines.append(f"    return {item.entry}")
    lines.append(_DISPATCH)
    args = tuple(_with_number(f"{number}, {patience}", text) for number, item in enumerate(items) for text in item.args)
    return FunctionRun(source="\n".join(lines), entry="_run", args=args, limits=_LIMITS, forbidden_imports=forbidden)


def _with_number(number: str, args: str) -> str:
    return f"[{number}]" if args == "[]" else f"[{number}, {args[1:]}"


def budgeted(source: str) -> str:
    """The source with a count of its loop turns and calls; the same text where there is nothing to count."""
    tree = syntax.parse(source)
    counted = False
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While):
            node.body.insert(0, ast.Expr(ast.Call(ast.Name("_turn", ast.Load()), [], [])))
            counted = True
        elif isinstance(node, ast.comprehension):
            node.ifs.insert(0, ast.Call(ast.Name("_turn", ast.Load()), [], []))
            counted = True
        elif isinstance(node, ast.FunctionDef) and _calls(node, node.name):
            node.body.insert(0, ast.Expr(ast.Call(ast.Name("_turn", ast.Load()), [], [])))
            counted = True
    return f"{_PROLOGUE}\n{ast.unparse(tree)}" if counted else source


def _calls(node: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(node))
