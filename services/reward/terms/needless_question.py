"""Questions to a person in an attempt that nobody answers: the task says what to do."""

from __future__ import annotations

import re

from shared.terms import Evidence, Found, Seen

_ASKS = re.compile(
    r"\b(?:would you like|do you want|shall i|should i|may i|can you (?:please )?(?:confirm|clarify|provide|tell|share)|"
    r"could you (?:please )?(?:confirm|clarify|provide|tell|share)|which (?:one|option|approach) (?:do|would) you|"
    r"what would you (?:like|prefer)|is (?:this|that) (?:ok|okay|what you want|acceptable)|please (?:confirm|clarify|advise))\b"
    r"|\blet me know (?:if|whether|how|what|which)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
MAX_TEXT = 20_000  # characters of one message


def find(seen: Seen) -> Found:
    """Count the messages that ask a person for a decision. Code in them is passed over."""
    evidence = []
    for turn in seen.turns:
        text = _CODE.sub(" ", turn.text[:MAX_TEXT])
        if asked := _ASKS.search(text):
            begin = text.rfind("\n", 0, asked.start()) + 1
            evidence.append(Evidence(f"asks: {' '.join(text[begin : asked.end() + 80].split())[:160]}", turn.number))
    return Found(float(len(evidence)), evidence)
