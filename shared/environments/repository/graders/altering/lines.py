"""Changes to tests in languages without a parser here: one line of a test, found by its heading and its indentation."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

_LEAVES = re.compile(r"\b(return|break|continue|goto)\b")
_NUMBER = re.compile(r"-?\d+")


def altered(
    text: str,
    heading: re.Match[str],
    equality: re.Pattern[str],
    sentinel: str,
    choose: random.Random,
    fits: Callable[[str, int], bool] = lambda text, end: True,
) -> str:
    """Return the file with one change. `heading`: up to the `{` of the test's body. `equality`: a whole line that compares with
    a literal, the group `literal`. `sentinel`: a statement that fails, put in front of the body where no such line is reached.
    `fits`: takes the file and where such a line ends, and says whether a change of it makes the test fail."""
    lines = _reached(text, heading)
    matches = [(start, match) for start, line in lines if (match := equality.fullmatch(line))]
    places = [(start, match) for start, match in matches if fits(text, start + match.end())]
    if places:
        start, match = choose.choice(places)
        first, last = start + match.start("literal"), start + match.end("literal")
        return text[:first] + _other(match["literal"], choose) + text[last:]
    if lines and choose.random() < 0.5:  # a line of its own
        start, line = lines[0]
        indent = line[: len(line) - len(line.lstrip())]
        return f"{text[:start]}{indent}{sentinel}\n{text[start:]}"
    return text[: heading.end()] + f" {sentinel} " + text[heading.end() :]


def two(choose: random.Random) -> tuple[int, int]:
    """Return two different numbers for a sentinel."""
    one = choose.randrange(2, 90)
    return one, one + choose.choice((-1, 1, 2, 3, 7))


def _reached(text: str, heading: re.Match[str]) -> list[tuple[int, str]]:
    """Return (offset, line) of the body's own lines up to the first that could leave it early. They are indented like the first."""
    found: list[tuple[int, str]] = []
    start = text.find("\n", heading.end()) + 1
    if not start or text[heading.end() : start].strip():
        return found
    begin = text.rfind("\n", 0, heading.start() + 1) + 1
    own = len(text[begin:]) - len(text[begin:].lstrip(" \t\n"))
    body = None
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        line = text[start:end].rstrip("\r")
        indent = len(line) - len(line.lstrip(" \t"))
        if line.strip():
            if indent <= own and (line.lstrip().startswith("}") or _LEAVES.search(line)):
                break
            if _LEAVES.search(line) or "`" in line or "/*" in line:
                break
            body = indent if body is None else body
            if indent == body:
                found.append((start, line))
        start = end + 1
    return found


def _other(literal: str, choose: random.Random) -> str:
    if _NUMBER.fullmatch(literal):
        return str(_near(int(literal), choose))
    return literal[:-1] + choose.choice(("a", "e", "s", "x", "1")) + literal[-1]


def _near(number: int, choose: random.Random) -> int:
    """Return another number that fits every type which the number fits: compilers refuse a literal that is too large."""
    if number == 0:
        return choose.choice((1, 2, 3, 5, 10))
    smaller = {abs(number) - 1, abs(number) - min(2, abs(number)), abs(number) // 2, abs(number) * 9 // 10} - {number}
    size = choose.choice(sorted(smaller - {abs(number)}))
    return size if number > 0 else -size
