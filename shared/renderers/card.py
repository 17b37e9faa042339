"""etude.json, the card of a checkpoint: the chat format that it speaks, and the tokens of a context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CARD = "etude.json"


class BadCard(ValueError):
    """A field of etude.json that cannot be used; the text names it, what was found and what is allowed."""


def context_of(card: Mapping[str, Any], least: int = 1, most: int | None = None) -> int | None:
    """Return the card's `context` in tokens, `least` to `most`; None: the card does not name it. Raises BadCard."""
    holds = card.get("context")
    if holds is None:
        return None
    if isinstance(holds, bool) or not isinstance(holds, int) or holds < least or (most is not None and holds > most):
        allowed = f"{least} to {most} (max_position_embeddings)" if most is not None else f"a whole number from {least}"
        raise BadCard(f"context: found {holds!r:.80}; allowed: {allowed}")
    return holds
