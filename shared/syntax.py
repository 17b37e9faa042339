"""Syntax trees of Python, from several threads."""

from __future__ import annotations

import ast
import threading

_PARSES = threading.Lock()


def expression(source: str) -> ast.expr:
    """Return the tree of one expression, as `ast.parse` with mode="eval" does. Raises what it raises."""
    with _PARSES:
        return ast.parse(source, mode="eval").body


def parse(source: str | bytes) -> ast.Module:
    """Return what `ast.parse` returns. Raises what it raises.

    One thread parses at a time: CPython 3.11 counts the depth of all threads in one counter. A thread that parses while a
    finalizer runs in another one's parse makes both raise SystemError ("AST constructor recursion depth mismatch")."""
    with _PARSES:
        return ast.parse(source)
