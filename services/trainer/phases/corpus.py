"""Documents of a folder or a JSONL file, and their token ids."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from shared.renderers.chat import read_json, token_text
from shared.renderers.vocabulary import Vocabulary

MOST_BYTES = 1_000_000  # of a file: larger ones are data, not text that somebody wrote
ENDS = ("<|endoftext|>", "<|end_of_text|>")  # what base models are pretrained with, before the end of a chat's turn


class BadCorpus(ValueError):
    """The corpus cannot be read. The text names the file and line, the field, what was found and what is allowed."""


@dataclass(slots=True)
class Seen:
    """What was taken, and what was passed over: reason -> files."""

    documents: int = 0
    passed_over: Counter[str] = field(default_factory=Counter)


def documents(source: Path, suffixes: Sequence[str], text_field: str, seen: Seen) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each document, in the order of the names. `suffixes`: of files in a folder; empty: all. A document
    that was there before, byte for byte, is passed over. Raises BadCorpus."""
    before: set[bytes] = set()
    found = _lines(source, text_field) if source.is_file() else _files(source, suffixes, seen)
    for name, text in found:
        digest = xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))
        if not text.strip():
            seen.passed_over["empty"] += 1
        elif digest in before:
            seen.passed_over["repeated"] += 1
        else:
            before.add(digest)
            seen.documents += 1
            yield name, text


def _files(folder: Path, suffixes: Sequence[str], seen: Seen) -> Iterator[tuple[str, str]]:
    if not folder.is_dir():
        raise BadCorpus(f"{folder}: found nothing there; allowed: a folder, or a JSONL file")
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            path = Path(here) / name
            if suffixes and not name.endswith(tuple(suffixes)):
                seen.passed_over["suffix"] += 1
            elif path.is_symlink() or not path.is_file():
                seen.passed_over["no regular file"] += 1
            elif path.stat().st_size > MOST_BYTES:
                seen.passed_over[f"over {MOST_BYTES:,} bytes"] += 1
            elif (text := _text(path.read_bytes())) is None:
                seen.passed_over["no UTF-8 text"] += 1
            else:
                yield path.relative_to(folder).as_posix(), text


def _text(data: bytes) -> str | None:
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _lines(path: Path, text_field: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line).get(text_field)
            except (ValueError, AttributeError, RecursionError):
                raise BadCorpus(f"{path}, line {number}: found no JSON object; allowed: one a line") from None
            if not isinstance(text, str):
                raise BadCorpus(f"{path}, line {number}: {text_field}: found {text!r:.80}; allowed: a text")
            yield f"{number}", text


def is_held_out(name: str, share: float, seed: int) -> bool:
    """Return whether a document belongs to the held-out part: by a hash of its name, so that it stays there as a corpus grows."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"), seed) < share * 2**64


@dataclass(frozen=True, slots=True)
class Marks:
    """The control tokens around a document. `begin` None: none."""

    begin: int | None
    end: int
    begin_text: str
    end_text: str


def marks_of(checkpoint: Path, vocabulary: Vocabulary, begin: str, end: str) -> Marks:
    """Return the tokens that begin and end documents. `end` empty: what the tokenizer names for it. Raises BadCorpus."""
    named = token_text(read_json(checkpoint / "tokenizer_config.json").get("eos_token"))
    end = end or next((text for text in (*ENDS, named) if text and text in vocabulary.control), "")
    for option, text in (("--begin", begin), ("--end", end)):
        if (text or option == "--end") and text not in vocabulary.control:
            some = ", ".join(sorted(vocabulary.control)[:8]) or "none, for it has no control tokens"
            raise BadCorpus(f"{option}: found {text!r}; allowed: a control token of the tokenizer ({some})")
    return Marks(vocabulary.control[begin] if begin else None, vocabulary.control[end], begin, end)


def encoded(text: str, vocabulary: Vocabulary, marks: Marks) -> np.ndarray:
    """Return a document's token ids, uint32. Spellings of control tokens in the text become plain text."""
    ids = vocabulary.plain(text)
    first = [] if marks.begin is None else [marks.begin]
    return np.asarray([*first, *ids, marks.end], np.uint32)
