"""Any conversation, under every renderer: the ids that are recorded are those that the engine saw, and bodies stay text.

`ETUDE_CONVERSATIONS=10000` runs so many a renderer (otherwise 12)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shared.renderers.detect import format_of
from shared.renderers.formats.chatml import ChatML
from shared.renderers.formats.jinja import Jinja
from shared.renderers.template import ChatTemplate
from tests.renderer_checkpoints import checkpoint
from tests.unit.renderers.conversation import Seen, conversations

CONVERSATIONS = int(os.environ.get("ETUDE_CONVERSATIONS", "12"))
# A renderer each: the template, whether the model thinks, and what its card says beside what is detected.
RENDERERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chatml: Qwen3": ("qwen3", "model", {}),
    "chatml: Qwen3, thinking opened": ("qwen3_thinking", "opened", {}),
    "chatml: Qwen3, thinking closed": ("qwen3", "no", {"thinking": "closed"}),
    "chatml: Qwen3, thinking kept": ("qwen3_keeps", "model", {}),
    "chatml: SmolLM2": ("smollm2", "no", {}),
    "chatml: SmolLM2, short words, lists of calls": ("smollm2", "no", {"tools": "short", "calls": "hermes-list"}),
    "jinja: Qwen3-Coder": ("qwen3_coder", "no", {}),
    "jinja: Llama 3.1": ("llama3_1", "no", {}),
    "jinja: Kimi K2": ("kimi_k2", "no", {}),
    "jinja: DeepSeek V3.1": ("deepseek_v3_1", "no", {}),
    "jinja: Harmony": ("harmony", "no", {}),
}


@pytest.mark.parametrize("name", list(RENDERERS))
def test_what_is_recorded_is_what_the_engine_saw(tmp_path: Path, name: str) -> None:
    template, thinks, more = RENDERERS[name]
    checkpoint(tmp_path, template)
    card = {"context": 1 << 24, **format_of(tmp_path), **more}
    (tmp_path / "etude.json").write_text(json.dumps(card))
    renderer = (ChatML if card["format"] == "chatml" else Jinja).load(tmp_path)
    theirs, seen = ChatTemplate.load(tmp_path), Seen()
    conversations(CONVERSATIONS, renderer, theirs, thinks, seen)()
    print(f"\n{seen.line(name)}")
    if path := os.environ.get("ETUDE_CONVERSATIONS_OUT"):
        with open(path, "a") as file:
            file.write(seen.line(name) + "\n")
