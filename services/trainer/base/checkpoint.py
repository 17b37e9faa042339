"""Writes a checkpoint directory: Hugging Face's files, the tokenizer and etude.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from services.trainer.base.settings import CONTEXT
from shared.model import Transformer, save_checkpoint
from shared.renderers.formats.compact_1 import NAME


def write_checkpoint(model: Transformer, tokenizer: Path, out: Path, **card: Any) -> None:
    """`card`: what goes into etude.json beside format and context, `parent` for example."""
    save_checkpoint(model, out)
    if tokenizer.resolve() != (out / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, out / "tokenizer.json")
    content = {"format": NAME, "context": CONTEXT, "parent": None, **card}
    (out / "etude.json").write_text(json.dumps(content, indent=2) + "\n")
