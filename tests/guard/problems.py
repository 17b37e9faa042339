"""Problems for the guard: a fixed few that need no mined pack, or a split of a pack's directory.

The fixed ones are written out, bug by bug. No rule that makes mutants, no library and no Python version can change them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.problems import Case, FunctionHidden, FunctionProblem, values
from shared.problems.pack import file_name, read_hidden, read_problems

Pair = tuple[FunctionProblem, FunctionHidden]
FILE = "solution.py"
ORIGIN = "guard:colorsys:rgb_to_hsv"  # no sandbox imports this module for these problems
FIXED_CONTEXT = 640  # tokens: the plain tokenizer has one for each byte

# name, source, (line, right text, broken text) for each bug, arguments. The first two arguments lists are shown.
FUNCTIONS: tuple[tuple[str, str, list[tuple[int, str, str]], list[list[Any]]], ...] = (
    ("clamp",
     "def clamp(x, low, high):\n    if x < low:\n        return low\n    if x > high:\n        return high\n    return x",
     [(1, "x < low", "x > low"), (4, "return high", "return low"), (5, "return x", "return -x")],
     [[9, 0, 5], [3, 0, 5], [-4, 0, 5], [7, 2, 8], [1, 2, 8]]),
    ("count_above",
     "def count_above(items, limit):\n    total = 0\n    for item in items:\n        if item > limit:\n            total += 1\n"
     "    return total",
     [(1, "total = 0", "total = 1"), (3, "item > limit", "item < limit"), (4, "total += 1", "total -= 1")],
     [[[1, 2, 3], 1], [[5, 5], 4], [[], 3], [[1, 9, 9, 9], 8], [[2, 4, 6, 8], 6]]),
    ("initials",
     "def initials(text):\n    words = text.split(' ')\n    return ''.join(w[0].upper() for w in words if w)",
     [(1, "split(' ')", "split('é')"), (2, "w[0]", "w[1]"), (2, "upper", "lower")],
     [["red fox"], ["hello big world"], ["zig zag"], ["él niño"], ["  x  "]]),
    ("digits",
     "def digits(n, base):\n    result = []\n    while n > 0:\n        result.append(n % base)\n        n = n // base\n"
     "    return result[::-1]",
     [(3, "n % base", "n - base"), (4, "n // base", "n // 1"), (5, "result[::-1]", "result")],
     [[6, 2], [10, 3], [255, 10], [31, 2], [0, 7]]),
    ("overlap",
     "def overlap(a, b):\n    low = max(a[0], b[0])\n    high = min(a[1], b[1])\n    return high - low if high > low else 0",
     [(1, "max", "min"), (2, "b[1]", "b[2]"), (3, "high - low", "low - high")],
     [[[0, 4], [1, 3]], [[2, 6], [4, 9]], [[0, 1], [5, 6]], [[1, 8], [0, 9]], [[3, 3], [3, 4]]]),
    ("table",
     "def table(pairs):\n    found = {}\n    for key, value in pairs:\n        if key not in found:\n"
     "            found[key] = [value]\n        else:\n            found[key].append(value)\n    return found",
     [(3, "not in", "in"), (4, "[value]", "value"), (6, "append(value)", "append(key)")],
     [[[["a", 1], ["a", 2]]], [[["b", 3], ["c", 4], ["b", 5]]], [[]], [[["é", 1.5], ["é", 2.5]]], [[["x", 0]] * 4]]),
    # Its solution lists the words in another order: a dict is equal in any.
    ("lengths",
     "def lengths(words):\n    found = {}\n    for word in words:\n        found[word] = len(word)\n    return found",
     [(2, "in words", "in words[1:]"), (3, "len(word)", "word")],
     [[["red", "fox"]], [["a", "bc", "def"]], [[]], [["x"]], [["up", "to", "you"]]]),
    # Its bug on the third line is not the whole repair: two lines are broken.
    ("span",
     "def span(items):  # maybe empty\n    low = min(items)\n    high = max(items)\n    return high - low + 1",
     [(1, "min(items)", "max(items)"), (3, "+ 1", "- 1")],
     [[[1, 5]], [[2, 2, 9]], [[7]], [[-3, 3]], [[10, 0, 5]]]),
)  # fmt: skip


def fixed() -> list[Pair]:
    """The small pack: each bug alone, and for `span` both together."""
    made: list[Pair] = []
    for name, source, bugs, inputs in FUNCTIONS:
        sets = [[bug] for bug in bugs] + ([bugs] if name == "span" else [])
        made += [_pair(f"{name}-{i}", name, source, chosen, inputs) for i, chosen in enumerate(sets)]
    return made


def _pair(key: str, name: str, source: str, bugs: list[tuple[int, str, str]], inputs: list[list[Any]]) -> Pair:
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # noqa: S102 - our own code above
    cases = [Case(args=values.encode(args), expected=values.encode(namespace[name](*args))) for args in inputs]
    lines = source.split("\n")
    for line, right, broken in bugs:
        assert right in lines[line], (key, right)
        lines[line] = lines[line].replace(right, broken, 1)
    text = "\n".join(lines) + "\n"
    # A mutant of `digits` may loop; its prompts do without what the broken code returned.
    actual = [] if name == "digits" else [_outcome(text, name, args) for args in inputs[:2]]
    problem = FunctionProblem(id=key, files={FILE: text}, entry=name, visible=cases[:2], actual=actual, origin=ORIGIN)
    solution = source.replace("in words", "in reversed(words)") if name == "lengths" else source
    return problem, FunctionHidden(id=key, cases=cases[2:], solution={FILE: solution + "\n"})


def _outcome(source: str, name: str, args: list[Any]) -> str:
    """A tagged value, or the name of the exception."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # noqa: S102 - one-line mutants of our own code above
    try:
        return values.encode(namespace[name](*args))
    except Exception as error:
        return type(error).__name__


def of_pack(directory: Path, split: str) -> list[Pair]:
    """All problems of one split, by id."""
    public = read_problems((directory / file_name(split, "public")).read_bytes())
    hidden = {one.id: one for one in read_hidden((directory / file_name(split, "hidden")).read_bytes())}
    return sorted(((one, hidden[one.id]) for one in public), key=lambda pair: pair[0].id)
