"""Long output of tools: both ends for the model, the whole in a file that it can read. Pure."""

from __future__ import annotations

MOST = 8000  # characters that one result shows
_END = 0.5  # of them from the end, where commands tell how they ended


def cut(text: str, most: int = MOST) -> tuple[str, str] | None:
    """Return the beginning and the end of a text that is too long, at whole lines where those are short; None: it fits."""
    if len(text) <= most:
        return None
    tail = int(most * _END)
    head = text[: most - tail]
    head = head[: head.rfind("\n") + 1] or head
    rest = text[len(head) :]
    end = rest[-tail:]
    newline = end.find("\n")
    if 0 <= newline < len(end) - 1 and newline < tail // 2:
        end = end[newline + 1 :]
    return head, end


def joined(text: str, parts: tuple[str, str], path: str) -> str:
    """Return both parts with a line between them that says how much is left out, and where the whole is."""
    head, end = parts
    left_out = text[len(head) : len(text) - len(end)]
    lines = left_out.count("\n")
    amount = f"{lines} lines" if lines else f"{len(left_out)} characters"
    return f"{head.rstrip(chr(10))}\n[{amount} left out; all of it: {path}]\n{end}"
