"""A small set of repair problems from functions of our own, so that end-to-end tests need no mined pack.

`python -m tests.end_to_end.problems FILE` writes it as a user's JSONL file (docs/problems.md).
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.problems import values
from shared.problems.mutations import Mutations

FUNCTIONS: tuple[tuple[str, str, list[list[Any]]], ...] = (
    ("clamp", "def clamp(x, low, high):\n    if x < low:\n        return low\n    if x > high:\n        return high\n    return x",
     [[x, lo, lo + 5] for x, lo in itertools.product(range(-3, 9), (0, 2))]),
    ("count_above", "def count_above(items, limit):\n    total = 0\n    for item in items:\n        if item > limit:\n            total += 1\n    return total",
     [[list(range(n)), k] for n, k in itertools.product(range(1, 9), range(0, 6, 2))]),
    ("pairs", "def pairs(items):\n    result = []\n    for i in range(len(items) - 1):\n        result.append(items[i] + items[i + 1])\n    return result",
     [[list(range(n, 2 * n + 1))] for n in range(1, 20)]),
    ("initials", "def initials(text):\n    words = text.split(' ')\n    return ''.join(w[0].upper() for w in words if w)",
     [[t] for t in ("a b", "red fox", "one two three", "x", "ab cd ef", "q w e r", "hello big world", "l m", "zig zag", "no on", "up to", "is it so")]),
    ("running_max", "def running_max(items):\n    best = items[0]\n    result = []\n    for item in items:\n        best = max(best, item)\n        result.append(best)\n    return result",
     [[[(i * k) % 7 for i in range(2, 8)]] for k in range(1, 20)]),
    ("overlap", "def overlap(a, b):\n    low = max(a[0], b[0])\n    high = min(a[1], b[1])\n    return high - low if high > low else 0",
     [[[i, i + 4], [j, j + 3]] for i, j in itertools.product(range(5), range(0, 8, 2))]),
    ("strip_suffix", "def strip_suffix(name, suffix):\n    if suffix and name.endswith(suffix):\n        return name[:-len(suffix)]\n    return name",
     [[n, s] for n in ("a.py", "data.txt", "x", "main.py.py", "readme") for s in (".py", "", "x", ".txt", "me")]),
    ("digits", "def digits(n, base):\n    result = []\n    while n > 0:\n        result.append(n % base)\n        n = n // base\n    return result[::-1]",
     [[n, b] for n in (1, 7, 10, 31, 255, 100) for b in (2, 3, 10)]),
)  # fmt: skip


def lines(per_function: int = 8, seed: int = 0) -> Iterator[str]:
    """JSONL lines: every problem has a visible case that fails and hidden cases of which at least one fails."""
    for name, source, inputs in FUNCTIONS:
        namespace: dict[str, Any] = {}
        exec(source, namespace)  # noqa: S102 - our own code above
        expected = [values.encode(namespace[name](*args)) for args in inputs]
        mutations = Mutations(source)
        sites = list(mutations.sites)
        random.Random(seed).shuffle(sites)
        made = 0
        for site in sites:
            mutant = mutations.render(site)
            if mutant is None or made == per_function:
                continue
            actual = [_outcome(mutant.source, name, args) for args in inputs]
            wrong = [i for i, (a, e) in enumerate(zip(actual, expected, strict=True)) if a != e]
            if len(wrong) < 3 or any("Timeout" in actual[i] for i in wrong):
                continue
            shown = [*wrong[:2], *[i for i in range(len(inputs)) if i not in wrong][:1]]
            case = [
                {"args": values.encode(list(args)), "expected": e} for args, e in zip(inputs, expected, strict=True)
            ]
            made += 1
            yield json.dumps(
                {
                    "id": f"{name}-{made}",
                    "kind": "function",
                    "prompt": "Repair the function.",
                    "files": {"solution.py": mutant.source + "\n"},
                    "entry": name,
                    "visible": [case[i] for i in shown],
                    "actual": [actual[i] for i in shown],
                    "hidden": [c for i, c in enumerate(case) if i not in shown],
                    "solution": {"solution.py": source + "\n"},
                    "bug": mutant.kind,
                    "cell": f"{name}-{made % 5}",
                }
            )


def _outcome(source: str, name: str, args: list[Any]) -> str:
    import signal

    def late(*_: object) -> None:
        raise TimeoutError

    namespace: dict[str, Any] = {}
    signal.signal(signal.SIGVTALRM, late)  # processor time: a busy machine changes no outcome
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.1)
    try:
        exec(source, namespace)  # noqa: S102 - single-line mutants of our own code above
        return values.encode(namespace[name](*copy.deepcopy(args)))  # a mutant may change what it is given
    except TimeoutError:
        return "Timeout"
    except Exception as error:
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def write(path: Path, *, copies: int = 1, **options: int) -> int:
    """`copies`: every problem so many times under other names, where a run must not run out of them."""
    rows = list(lines(**options))
    originals = [json.loads(row) for row in rows]
    rows += [json.dumps({**one, "id": f"{one['id']}-{again}"}) for again in range(1, copies) for one in originals]
    path.write_text("\n".join(rows) + "\n")
    return len(rows)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])), "problems")
