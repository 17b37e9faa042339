"""Secrets that an agent may have met, masked where people read: pages, reports. What is stored and trained stays exact.

Only what cannot be mistaken for code is masked: formats that their issuers document, private keys, passwords within addresses.
A secret without a form of its own passes; the first defence is that a sandbox holds none.
"""

from __future__ import annotations

import re

SHORTEST = 15  # characters; nothing shorter holds a secret of these forms

_FORMS = {
    "private key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?:.*?-----END [A-Z0-9 ]*PRIVATE KEY-----|.*)",
    "AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{22,255})\b",
    "GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "Google key": r"\bAIza[0-9A-Za-z_-]{35}",
    "API key": r"(?<![\w-])sk-[A-Za-z0-9_-]{20,}",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "PyPI token": r"\bpypi-[A-Za-z0-9_-]{50,}",
    "npm token": r"\bnpm_[A-Za-z0-9]{36}\b",
    # Taken with all that stands before it in its run of these characters: followed from each beginning, text made of
    # beginnings alone would be read once for each of them.
    "web token": r"(?<![A-Za-z0-9_-])(?=[A-Za-z0-9_-]*?\beyJ[A-Za-z0-9_-]{10})[A-Za-z0-9_-]*+"
    r"\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    "password": r"(?<=://)[^\s/:@'\"]{1,64}:[^\s/@'\"]{3,256}(?=@)",
}
_ANY = re.compile("|".join(f"(?P<g{i}>{form})" for i, form in enumerate(_FORMS.values())), re.DOTALL)
_NAMES = tuple(_FORMS)


def secrets(text: str) -> list[tuple[int, int, str]]:
    """(start, end, what it is) of each, in order, none within another."""
    if len(text) < SHORTEST:
        return []
    found = []
    for match in _ANY.finditer(text):
        kind = _NAMES[int((match.lastgroup or "g0")[1:])]
        start = match.start() + (match[0].index(":") + 1 if kind == "password" else 0)  # the user's name may be read
        found.append((start, match.end(), kind))
    return found


def masked(text: str) -> str:
    """`text` with ⟨AWS key⟩ and the like in the place of each secret. Idempotent."""
    parts, end = [], 0
    for start, stop, kind in secrets(text):
        parts += [text[end:start], f"⟨{kind}⟩"]
        end = stop
    return "".join([*parts, text[end:]]) if parts else text
