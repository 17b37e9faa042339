"""Which chat format a checkpoint speaks: named by `format` in its etude.json, read from its own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from shared.formats import Format

CARD = "etude.json"


class UnknownFormat(ValueError):
    """The checkpoint names no format, or one that is not here; the text says which are."""


def _compact(directory: Path) -> Format:
    from shared.formats.compact import Compact

    return Compact.load(directory)


FORMATS: dict[str, Callable[[Path], Format]] = {"compact-1": _compact}


def load_format(directory: Path) -> Format:
    """The format of a checkpoint directory. Raises UnknownFormat; the format itself refuses a tokenizer not its own."""
    path = directory / CARD
    try:
        name = json.loads(path.read_text()).get("format")
    except FileNotFoundError:
        raise UnknownFormat(
            f"{directory}: found no {CARD} there; allowed: a checkpoint directory that names its chat format, as `etude export` "
            "writes it"
        ) from None
    except (ValueError, AttributeError) as error:
        raise UnknownFormat(f"{path}: not a JSON object ({error})") from None
    if not isinstance(name, str) or name not in FORMATS:
        raise UnknownFormat(f"{path}: format {name!r:.80}; known: {', '.join(sorted(FORMATS))}")
    return FORMATS[name](directory)
