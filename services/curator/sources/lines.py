"""Joins the continued lines of Dockerfiles and shell scripts."""

from __future__ import annotations

from collections.abc import Iterator


def continued(text: str, *, comments: bool) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, joined lines with single blanks). Empty lines and lines of comments are left out.
    `comments`: they may stand inside a continued line, as in a Dockerfile; in a shell script they end it."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        idle = not line.strip() or line.lstrip().startswith("#")
        if idle and (comments or not joined):
            continue
        start = start if joined else number
        line = line.rstrip() if comments else line  # Docker allows blanks behind the backslash
        joined += line.removesuffix("\\")
        if not line.endswith("\\"):
            yield start, " ".join(joined.split())
            joined = ""
    if joined.strip():
        yield start, " ".join(joined.split())
