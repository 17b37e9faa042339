"""`edit`: replaces one exact, unique piece of text."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from shared.environments import ToolSpec
from shared.environments.tools import Toolbox, ToolError, lines_of, numbered, parameters, text_of

AROUND = 3  # lines shown before and behind a change
CANDIDATES = 5
_SIMILAR = 0.6  # of a line, to be called a candidate
_COMPARED = 20_000  # lines of a file that are compared; a longer one gets exact hints alone


class Tool:
    spec = ToolSpec(
        "edit",
        "Replace text in a file. `old` must occur exactly once.",
        parameters({"path": "string", "old": "string", "new": "string"}),
        "changes",
    )

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str:
        path, old, new = arguments["path"], arguments["old"], arguments["new"]
        if not old:
            raise ToolError(
                "argument 'old': found an empty text; allowed: text of the file (a new file is made with write)"
            )
        if old == new:
            raise ToolError("arguments 'old' and 'new' are equal; allowed: a change")
        text = await text_of(box, path)
        places = occurrences(text, old)
        if not places:
            raise ToolError(f"{path}: 'old' does not occur. {_hint(text, old)}")
        if len(places) > 1:
            lines = ", ".join(str(text.count("\n", 0, at) + 1) for at in places[:20])
            raise ToolError(
                f"{path}: 'old' occurs {len(places)} times, at lines {lines}; allowed: once. Add lines around it"
            )
        at = places[0]
        changed = text[:at] + new + text[at + len(old) :]
        await box.files.write(box.path(path), changed.encode("utf-8", "surrogateescape"))
        return f"edited {path}:\n{_around(changed, at, len(new))}"


def occurrences(text: str, old: str) -> list[int]:
    """Return where `old` begins in the text, overlapping ones included."""
    places, at = [], text.find(old)
    while at >= 0:
        places.append(at)
        at = text.find(old, at + 1)
    return places


def _around(text: str, at: int, length: int) -> str:
    lines = lines_of(text)
    first, last = text.count("\n", 0, at), text.count("\n", 0, at + length)
    begin, end = max(0, first - AROUND), min(len(lines), last + AROUND + 1)
    return numbered(lines[begin:end], begin + 1)


def _hint(text: str, old: str) -> str:
    """Name the lines that the caller may have meant: equal but for white space, or else similar to the first line."""
    lines, wanted = lines_of(text), [" ".join(line.split()) for line in lines_of(old)]
    bare = [" ".join(line.split()) for line in lines]
    same = [at for at in range(len(lines) - len(wanted) + 1) if bare[at : at + len(wanted)] == wanted]
    if same:
        at = same[0]
        shown = numbered(lines[at : at + len(wanted)], at + 1)
        others = f" (and at {', '.join(str(one + 1) for one in same[1:CANDIDATES])})" if len(same) > 1 else ""
        return f"White space differs at line {at + 1}{others}; the file has:\n{shown}"
    target = next((line for line in wanted if line), "")
    if not target or len(lines) > _COMPARED:
        return "Read the file again"
    matcher = SequenceMatcher(b=target, autojunk=False)
    scored = []
    for at, line in enumerate(bare):
        matcher.set_seq1(line)
        if line and matcher.real_quick_ratio() >= _SIMILAR and matcher.quick_ratio() >= _SIMILAR:
            scored.append((matcher.ratio(), at))
    close = sorted(
        at for score, at in sorted(scored, key=lambda one: (-one[0], one[1]))[:CANDIDATES] if score >= _SIMILAR
    )
    if not close:
        return "No line is similar. Read the file again"
    return "Similar lines:\n" + "\n".join(numbered([lines[at]], at + 1) for at in close)
