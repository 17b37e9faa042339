"""Loads a checkpoint's renderer: `format` in its card, etude.json, names it, and it is made from the checkpoint's tokenizer.

The formats of this project are the modules of `shared.renderers.formats`. Other packages add theirs by an entry point of the
group `etude.renderers`: its name is the format, its object a function from the checkpoint's directory to a renderer.
`NAME:REST` is the format NAME; its renderer reads REST from the card.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from shared.plugins import Plugins, UnknownName, modules_of
from shared.renderers import Renderer, formats
from shared.renderers.card import CARD

PLUGINS = Plugins(
    "etude.renderers",
    {name.replace("_", "-"): value for name, value in modules_of(formats, "load").items()},
)

Load = Callable[[Path], Renderer]


class UnknownFormat(ValueError):
    """The checkpoint names no format, or one that is not here; the text says which are."""


def known() -> list[str]:
    """Return the names of all formats that can be loaded here, without loading any."""
    return PLUGINS.names()


def load_renderer(directory: Path) -> Renderer:
    """Return the renderer of a checkpoint directory. Raises UnknownFormat; the renderer itself refuses a tokenizer not its
    own."""
    path = directory / CARD
    try:
        name = json.loads(path.read_text()).get("format")
    except FileNotFoundError:
        raise UnknownFormat(
            f"{directory}: found no {CARD} there; allowed: a checkpoint directory that names its chat format, as `etude export` "
            f"writes it; `etude import {directory} --out NEW` makes one of a Hugging Face folder"
        ) from None
    except (ValueError, AttributeError) as error:
        raise UnknownFormat(f"{path}: not a JSON object ({error})") from None
    if not isinstance(name, str) or (load := _loader(name.partition(":")[0])) is None:
        raise UnknownFormat(f"{path}: format {name!r:.80}; known: {', '.join(known())}")
    return load(directory)


def _loader(name: str) -> Load | None:
    try:
        load: Load = PLUGINS.load(name)
    except UnknownName:
        return None
    return load
