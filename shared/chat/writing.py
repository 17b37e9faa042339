"""Assistants' turns that were not sampled here, as ids: what a client or a script says the model said. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shared.renderers import Renderer, Unwritable
from shared.renderers.calls.hermes import CLOSE, OPEN, Hermes
from shared.renderers.chat import Chat


def written(
    renderer: Renderer,
    text: str,
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    thinking: str = "",
    shielded: bool,
) -> list[int]:
    """Return the ids of a turn, from behind the generation prompt to the token that ends it. `calls`: names and arguments.
    `shielded`: a control token that the text spells stays text; False: it becomes one, as if it was sampled. Raises Unwritable."""
    if not isinstance(renderer, Chat) or (calls and not isinstance(renderer.calls, Hermes)):
        raise Unwritable(
            f"found chat format {renderer.name!r}, whose calls cannot be written here; allowed: format chatml with Hermes' calls"
        )
    vocabulary = renderer.vocabulary
    bodies = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    guard = vocabulary.guard([text, thinking, *bodies])
    thought = f"<think>\n{vocabulary.shield(thinking, guard)}\n</think>\n\n" if thinking else ""
    parts = [vocabulary.shield(text, guard) if shielded else text] if text else []
    parts += [f"{OPEN}\n{vocabulary.shield(body, guard)}\n{CLOSE}" for body in bodies]
    return [*vocabulary.ids(thought + "\n".join(parts), guard), renderer.stop_tokens[0]]
