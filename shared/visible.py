"""Hostile text for people: what would steer a terminal, a browser or the order of reading becomes a visible name."""

from __future__ import annotations

import re
import unicodedata

KEEP = "\n\t"
_SUSPECT = re.compile(r"[^ -~\n\t]")  # all that needs a look: most texts have none of it
ASCII_CONTROLS = """
NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US
"""


def visible(text: str) -> str:
    """Control characters become their names (⟨ESC⟩), invisible and bidirectional ones ⟨U+202E⟩. Idempotent.
    Markup is no concern of this function: the templates escape."""
    return _SUSPECT.sub(lambda found: _name(found[0]) if _hidden(found[0]) else found[0], text)


def _hidden(c: str) -> bool:
    # Control, format (bidi, zero width, tags), lone surrogates, private, unassigned, line separators; other spaces stay.
    return not c.isprintable() and unicodedata.category(c) != "Zs"


def _name(c: str) -> str:
    code = ord(c)
    if code < 0x20:
        return f"⟨{ASCII_CONTROLS.split()[code]}⟩"
    return "⟨DEL⟩" if code == 0x7F else f"⟨U+{code:04X}⟩"
