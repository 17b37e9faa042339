"""Comments that think aloud instead of explaining the code."""

from __future__ import annotations

import io
import re
import tokenize

from shared.problems.schema import MAX_CODE
from shared.terms import Evidence, Found, Seen

_THOUGHT = re.compile(
    r"\b(wait|hmm+|let me|let's see|i think|i need to|i should|maybe|actually|not sure|on second thought)\b",
    re.IGNORECASE,
)


def find(seen: Seen) -> Found:
    """Count the comments added to Python files that think aloud."""
    evidence = []
    for path, text in sorted(seen.after.items()):
        if not path.endswith(".py") or not (last := _last_line(text)):
            continue
        before = seen.before.get(path, "")
        thoughts = [(line, comment) for line, comment in comments(text, last) if _THOUGHT.search(comment)]
        if any(comment in before for _, comment in thoughts):  # perhaps as a comment: only a tokenizer knows
            old = {comment for _, comment in comments(before, _last_line(before))}
            thoughts = [(line, comment) for line, comment in thoughts if comment not in old]
        evidence += [Evidence(f"{path}:{line}: {comment[:200]}") for line, comment in thoughts]
    return Found(float(len(evidence)), evidence)


def _last_line(text: str) -> int:
    """Return the last line, from 1, that could hold such a comment; 0: none could. Most files have none."""
    lines = text.split("\n") if "#" in text else []
    for number in range(len(lines), 0, -1):
        line = lines[number - 1]
        if "#" in line and _THOUGHT.search(line, line.index("#")):
            return number
    return 0


def comments(text: str, last: int) -> list[tuple[int, str]]:
    """Return (line, text) of the comments up to line `last`, as far as the text can be read as Python. A very long text is not
    read."""
    if len(text) > MAX_CODE:
        return []
    found = _scanned(text, last)
    return _tokenized(text) if found is None else found


def _tokenized(text: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                found.append((token.start[0], token.string))
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


# Everything that decides where a comment is. A quote alone begins a string that does not end as usual.
_PARTS = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<line>\n)|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<joined>\\\n)"""
    r"""|(?P<string>\'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*\'\'\'|"{3}[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"{3}"""
    r"""|'(?!'')[^\n'\\]*(?:\\[^\n][^\n'\\]*)*'|"(?!"")[^\n"\\]*(?:\\[^\n][^\n"\\]*)*")|(?P<quote>['"])""",
    re.DOTALL,
)
_INDENT = re.compile(r"[ \t]*")


def _scanned(text: str, last: int) -> list[tuple[int, str]] | None:
    """Return what `_tokenized` finds up to line `last`, many times as fast. None: the text has something unusual, such as a string
    without an end or a line that is indented as no other; only the tokenizer knows what it makes of that."""
    if "\r" in text or "\f" in text:
        return None
    found: list[tuple[int, str]] = []
    line, depth, indents = 1, 0, [0]
    if not _indented(text, 0, indents):
        return None
    for part in _PARTS.finditer(text):
        kind = part.lastgroup
        if kind == "line":
            line += 1
            if line > last:
                break
            if depth == 0 and not _indented(text, part.end(), indents):
                return None
        elif kind == "comment":
            found.append((line, part[0]))
        elif kind == "string":
            line += part[0].count("\n")
        elif kind == "joined":
            line += 1
        elif kind == "open":
            depth += 1
        else:
            depth -= 1
            if depth < 0 or kind == "quote":
                return None
    return found


def _indented(text: str, start: int, indents: list[int]) -> bool:
    """Take the indentation of the logical line at `start`. False: it returns to none of the lines before it."""
    space = _INDENT.match(text, start)
    assert space is not None
    if text[space.end() : space.end() + 1] in ("", "#", "\n"):
        return True
    column = len(space[0].expandtabs(8))
    if column > indents[-1]:
        indents.append(column)
    while column < indents[-1]:
        if column not in indents:
            return False
        indents.pop()
    return True
