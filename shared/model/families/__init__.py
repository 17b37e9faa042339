"""Model families: what a `model_type` of config.json means, one file each.

A family's file holds everything that depends on the name of the family: which fields of config.json it reads and refuses,
the defaults of transformers, its variants of attention, norm, bias and router (as facts of `ModelConfig`), how SGLang holds
it (`Serving`), and how llama.cpp stores it (`Gguf`). To add one, write `<family>.py` with a `FAMILY` and give it a case in
`tests/unit/model/test_parity.py`: every module of this folder is a family (`parts` holds what they share). Another package
registers its own under the entry point group `etude.families`, as `name = module:FAMILY`.

Nothing outside this folder compares `model_type` with a name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.model.config import ModelConfig
from shared.model.fields import Fields, UnknownModel
from shared.plugins import Plugins, modules_of

_OWN = modules_of(sys.modules[__name__], "FAMILY")
PLUGINS = Plugins("etude.families", _OWN)
FAMILIES = tuple(sorted(_OWN))


@dataclass(frozen=True, slots=True)
class Gguf:
    """Says how llama.cpp stores a family in GGUF files.

    `architecture`: the value of `general.architecture` in its files. `config`: makes config.json from the file's
    metadata. `permuted`: True: rotary pairs are the rows (2i, 2i+1) of q and k; False: the rows (i, i + D/2), as in
    Hugging Face's files.
    """

    architecture: str
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    permuted: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """`name`: `model_type` of config.json. `read` raises UnknownModel naming the first field that Étude does not compute as the
    family does. `gguf`: None: its GGUF files cannot be read. `tokenizer` writes tokenizer.json into a folder that has the tokenizer
    in the family's own form; None: the family publishes tokenizer.json."""

    name: str
    read: Callable[[Fields], ModelConfig]
    gguf: Gguf | None = None
    tokenizer: Callable[[Path], None] | None = None


def names() -> list[str]:
    """All families, ours first."""
    return [*FAMILIES, *(name for name in PLUGINS.names() if name not in FAMILIES)]


def family(name: object) -> Family:
    """The family of this `model_type`. Imports its file alone. Raises UnknownModel naming those that there are."""
    if not isinstance(name, str) or (name not in FAMILIES and name not in names()):  # names() looks at all packages
        raise UnknownModel(f"config.json: model_type {name!r:.80}; allowed: {', '.join(names())}")
    return _load(name)


def with_gguf() -> Iterator[Family]:
    """The families that a GGUF file may hold."""
    return (found for found in map(_load, names()) if found.gguf is not None)


@cache
def _load(name: str) -> Family:
    found = PLUGINS.load(name)
    if not isinstance(found, Family) or found.name != name:
        raise TypeError(f"entry point {name!r} of {PLUGINS.group}: found {found!r:.80}; allowed: a Family of that name")
    return found
