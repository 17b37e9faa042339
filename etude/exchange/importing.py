"""Checkpoints into the object store, or into directories that runs can start from.

An imported checkpoint has every tensor that its architecture asks for, in its shape, finite, and a tokenizer and chat
format that fit: a run that starts from it does not fail later. It is written in bf16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from etude.exchange.card import check_format, write_card
from etude.exchange.checking import check
from etude.exchange.errors import NotExchanged, located
from etude.exchange.folder import complete, copy_small, normalised, whole
from etude.exchange.store import NAME, store
from shared.contracts.run import Ref
from shared.objects import Objects


@dataclass(frozen=True, slots=True)
class Imported:
    """`new`: False where the same weights had this name before. `notes`: what a person should know."""

    name: str
    ref: Ref
    parameters: int
    new: bool
    notes: tuple[str, ...]


def import_checkpoint(objects: Objects, source: Path, *, name: str = "", chat: str = "", context: int = 0) -> Imported:
    """Check a Hugging Face directory or a GGUF file and store it as `checkpoints/<name>`, which a run can start from. `chat`,
    `context`: what its etude.json would say, where it has none. Raises NotExchanged."""
    source = source.resolve()
    name = name or (source.stem if _is_gguf(source) else source.name)
    if not NAME.fullmatch(name):
        raise NotExchanged(f"--name: found {name!r}; allowed: letters, digits, '.', '_' and '-', 80 at most")
    with tempfile.TemporaryDirectory(prefix="etude-import-") as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        parameters, notes = _taken_in(source, folder, chat, context)
        ref, new = store(objects, name, folder)
    return Imported(name, ref, parameters, new, notes)


def import_to(source: Path, out: Path, *, chat: str = "", context: int = 0) -> tuple[int, tuple[str, ...]]:
    """As `import_checkpoint`, into a directory and not into the object store. Returns the number of parameters, and notes."""
    with whole(out) as folder:
        found = _taken_in(source.resolve(), folder, chat, context)
        complete(folder)
    return found


def _taken_in(source: Path, folder: Path, chat: str, context: int) -> tuple[int, tuple[str, ...]]:
    """Write a whole checkpoint with its card into an empty folder. Returns the number of parameters, and notes."""
    with _directory(source) as directory:
        checked = check(directory)
        copy_small(directory, folder)
        try:
            _tokenizer(folder)
            write_card(folder, chat, context, checked.positions)
            check_format(folder, checked.vocabulary)
        except NotExchanged as error:  # they look at the copy, and the user knows the source
            said = str(error).replace(f"{folder}/", "").replace(f"{folder}: ", "")
            raise NotExchanged(f"{source}: {said}") from None
        return normalised(directory, folder, checked), checked.notes


def _tokenizer(folder: Path) -> None:
    """Write tokenizer.json if the family publishes its tokenizer in another form."""
    from shared.model.config import ModelConfig, UnknownModel
    from shared.model.families import family

    if (folder / "tokenizer.json").exists():
        return
    write = family(ModelConfig.load(folder).model_type).tokenizer
    try:
        if write is not None:
            write(folder)
    except UnknownModel as error:
        raise NotExchanged(str(error)) from None


@contextmanager
def _directory(source: Path) -> Iterator[Path]:
    """The Hugging Face directory of a source: itself, or one made of a GGUF file for as long as it is read."""
    if not _is_gguf(source):
        yield source
        return
    from shared.model.config import UnknownModel
    from shared.model.gguf_file import convert

    with tempfile.TemporaryDirectory(prefix="etude-gguf-") as scratch:
        try:
            convert(source, Path(scratch))
        except UnknownModel as error:
            raise located(source, error) from None
        yield Path(scratch)


def _is_gguf(source: Path) -> bool:
    return source.suffix == ".gguf" and not source.is_dir()
