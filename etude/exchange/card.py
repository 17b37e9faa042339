"""etude.json, the card of a checkpoint: read, written, and proved to fit the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from etude.exchange.errors import NotExchanged
from shared.renderers import Renderer
from shared.renderers import card as cards
from shared.renderers.card import CARD
from shared.renderers.registry import known, load_renderer

WAY_OUT = "where it speaks one of them: --format NAME"


def read_card(folder: Path) -> dict[str, Any]:
    try:
        card = json.loads((folder / CARD).read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise NotExchanged(f"{CARD}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise NotExchanged(f"{CARD}: not JSON ({error})") from None
    if not isinstance(card, dict):
        raise NotExchanged(f"{CARD}: found {type(card).__name__}; allowed: a JSON object")
    if not isinstance(card.get("format"), str | None):
        raise NotExchanged(f"{CARD}: format: found {card['format']!r:.80}; allowed: {', '.join(known())}")
    return card


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_card(folder: Path, chat: str, context: int, positions: int) -> None:
    card = read_card(folder)
    named = card.get("format") or chat
    if chat and named != chat:
        raise NotExchanged(f"--format {chat}: its etude.json says {named!r}")
    if named and not accepts(named):
        told = f"--format {named}" if chat else f"etude.json names the chat format {named!r}"
        raise NotExchanged(f"{told}: not known; allowed: {', '.join(known())}; {WAY_OUT}")
    if "format" not in card:
        card = {**_proved(folder, named), **card}
    holds = context_of({**card, "context": context} if context else card, positions)
    write_json(folder / CARD, {**card, "context": holds})


def accepts(name: str) -> bool:
    """Return whether a checkpoint may name this chat format."""
    return name.partition(":")[0] in known()


def _proved(folder: Path, named: str) -> dict[str, Any]:
    """Return the fields of a card as the checkpoint's own chat template and tokenizer prove them. `named`: the format that the
    user chose; empty: the proved one. Raises NotExchanged."""
    from shared.renderers.chat import UnfitCheckpoint
    from shared.renderers.detect import format_of

    try:
        found = format_of(folder)
    except UnfitCheckpoint as error:
        if named:
            return {"format": named}
        raise NotExchanged(
            f"it has no etude.json that names a chat format, and its files prove none: {error}. Where it speaks one of "
            f"{', '.join(known())}: --format NAME"
        ) from None
    if named in ("", found["format"]):
        return found
    calls = {"calls": found["calls"]} if "calls" in found else {}  # the reader was proved whatever writes the rest
    return {"format": named, **calls}


def context_of(card: dict[str, Any], positions: int) -> int:
    """Tokens of a context: those that the card says, else as many as the model has positions. Raises NotExchanged."""
    from shared.renderers.formats.compact_1 import SMALLEST_CONTEXT

    try:
        return cards.context_of(card, SMALLEST_CONTEXT, positions) or positions
    except cards.BadCard as error:
        raise NotExchanged(str(error)) from None


def check_format(folder: Path, vocabulary: int) -> Renderer:
    """Return the renderer that the card names. Raises NotExchanged."""
    try:
        chat = load_renderer(folder)
    except ValueError as error:
        raise NotExchanged(f"its chat format cannot be read: {str(error).replace(f'{folder}/', '')}") from None
    if chat.vocab_size > vocabulary:
        raise NotExchanged(
            f"tokenizer.json has {chat.vocab_size} tokens; config.json has room for {vocabulary} (vocab_size)"
        )
    return chat
