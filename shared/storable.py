"""Text as every store keeps it. PostgreSQL refuses NUL, and UTF-8 has no lone surrogates.

Codec and ledger replace both by characters of the same meaning, so that all readers of a message see one text.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

NUL, SURROGATE = "\N{SYMBOL FOR NULL}", "\N{REPLACEMENT CHARACTER}"  # neither is longer than what it replaces in JSON
_LONE = re.compile("[\ud800-\udfff]")
_UNFIT = re.compile("[\0\ud800-\udfff]")
# The escape of NUL in JSON: after an even number of backslashes, or it is text that looks like one.
_ESCAPED = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


def text(value: str) -> str:
    """Return the text with U+2400 for each NUL and U+FFFD for each lone surrogate. Idempotent."""
    return value if value.isascii() and "\0" not in value else _UNFIT.sub(_fit, value)


def encodable(value: str) -> str:
    """Return the text with U+FFFD for each lone surrogate: text that UTF-8 has. NUL stays. Idempotent."""
    return value if value.isascii() else _LONE.sub(SURROGATE, value)


def without_nul(data: bytes) -> bytes:
    """Return JSON that says U+2400 where it said NUL."""
    return _ESCAPED.sub(rb"\1" + NUL.encode(), data) if rb"\u0000" in data else data


def to_json(value: Any) -> bytes:
    """Return any value that msgspec knows as JSON, its texts storable."""
    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:
        data = msgspec.json.encode(_mapped(msgspec.to_builtins(value)))
    return without_nul(data)


def _fit(found: re.Match[str]) -> str:
    return NUL if found[0] == "\0" else SURROGATE


def _mapped(value: Any) -> Any:
    match value:
        case str():
            return text(value)
        case dict():
            return {_mapped(name): _mapped(item) for name, item in value.items()}
        case list() | tuple():
            return [_mapped(item) for item in value]
    return value
