"""A checkpoint's tokenizer, in two forms: one that knows its control tokens, and one that has never heard of them.

Every added token counts as a control token, the non-special ones too (Qwen's `<think>` and `<tool_call>`), but for those
that are nothing but white space. Text of people, files and tools is *shielded*: a guard character, which the text
does not hold itself, is put into each spelling of a control token. A template may then be rendered over it. `ids` splits the
result at the control tokens, takes the guard out again, and encodes what lies between in one pass each.

Invariants:
- No id of a control token comes of shielded text.
- Text that spells no control token gives the ids that the tokenizer gives.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.renderers.pieces import Pieces

GUARDS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))  # noncharacters of Unicode: never meant to be interchanged
SHORT = 64  # characters
HALF = "\ufffd"  # what half a character reads as


class BadTokenizer(ValueError):
    """A tokenizer that cannot be used; the text names what was found and what is allowed."""


class Vocabulary:
    """`control`: spelling to id of each control token; `spelling`: id to spelling. `size`: one more than the largest id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.control = {token.content: id for id, token in added.items() if token.content.strip()}
        self.special = frozenset(id for id, token in added.items() if token.special)
        self.control_ids = frozenset(self.control.values())
        self.spelling = {id: text for text, id in self.control.items()}
        if single := sorted(text for text in self.control if len(text) == 1):
            raise BadTokenizer(
                f"tokenizer.json: added token {single[0]!r}; allowed: added tokens of two characters and more"
            )
        self.tokenizer = tokenizer
        written = json.loads(tokenizer.to_str())
        self._plain = Tokenizer.from_str(json.dumps({**written, "added_tokens": []}))
        self._pieces = Pieces.of(self._plain, written)
        self._spaces = {token.content: id for id, token in added.items() if not token.content.strip()}
        spaces = sorted(map(re.escape, self._spaces), key=len, reverse=True)
        self._space = re.compile("|".join(spaces)) if spaces else None
        self._short = functools.lru_cache(maxsize=4096)(self._encode)  # pieces of templates come again and again
        words = tokenizer.get_vocab()
        self.size = max(words.values(), default=-1) + 1
        self.longest = max(map(len, words), default=1)  # characters of a token, at most
        byte_level = (written.get("decoder") or {}).get("type") == "ByteLevel"
        self._octets = _octets_of(words, self.spelling) if byte_level else None
        by_length = sorted(self.control, key=len, reverse=True)  # the longest at a place, as the tokenizer matches
        flags = {token.content: token for token in added.values()}
        self._any = re.compile("|".join(_pattern(flags[text]) for text in by_length)) if by_length else None
        starts = (f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in by_length)
        self._start = re.compile("|".join(starts)) if by_length else None
        self._prefixes = frozenset(text[:n] for text in self.control for n in range(1, len(text)))
        self._longest_control = max(map(len, self.control), default=0)
        self._require_plain()

    @classmethod
    def load(cls, directory: Path) -> Vocabulary:
        """Return the vocabulary of a checkpoint directory. Raises BadTokenizer."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise BadTokenizer(f"{directory}: found no tokenizer.json; allowed: a tokenizer as `tokenizers` writes it")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise BadTokenizer(f"{path}: no tokenizer can be read from it ({error})") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer)

    # Writing

    def guard(self, bodies: Iterable[str]) -> str:
        """Return a character that none of the texts holds, neither as it is nor as JSON escapes it. If they hold all of GUARDS,
        as a table of Unicode may, return one character several times."""
        texts = list(bodies)
        guards = (guard * 2**power for power in itertools.count() for guard in GUARDS)
        return next(guard for guard in guards if not any(guard in text or _escaped(guard) in text for text in texts))

    def shield(self, body: str, guard: str) -> str:
        """Insert the guard in each spelling of a control token, and after a trailing prefix of one: 'x <|im_' must not join with
        the template's next characters."""
        if self._start is None:
            return body
        shielded = self._start.sub(lambda found: found.group() + guard, body)
        begun = any(body[-n:] in self._prefixes for n in range(1, min(self._longest_control, len(body) + 1)))
        return shielded + guard if begun else shielded

    def ids(self, text: str, guard: str = "") -> list[int]:
        """Return the ids of a text in which spellings of control tokens are control tokens, unless a guard stands in them."""
        ids: list[int] = []
        at = 0
        if self._any is not None:
            for found in self._any.finditer(text):
                ids += self._between(text[at : found.start()], guard)
                spelling = found.group()
                ids.append(self.control[spelling if spelling in self.control else spelling.strip()])
                at = found.end()
        return ids + self._between(text[at:], guard)

    def plain(self, body: str) -> list[int]:
        """Return the ids of a text, never of a control token."""
        return list(self._short(body) if len(body) <= SHORT else self._encode(body))

    def _encode(self, body: str) -> tuple[int, ...]:
        if self._space is None:
            return self._run(body)
        ids: list[int] = []
        at = 0
        for found in self._space.finditer(body):
            ids += self._run(body[at : found.start()])
            ids.append(self._spaces[found.group()])
            at = found.end()
        return (*ids, *self._run(body[at:]))

    def _run(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        if self._pieces is not None and text.isascii():
            return self._pieces.ids(text)
        return tuple(self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)  # without places: faster

    def _between(self, text: str, guard: str) -> list[int]:
        return self.plain(text.replace(guard, "").replace(_escaped(guard), "") if guard else text)

    # Reading

    def text(self, ids: Sequence[int]) -> str:
        """Return the ids as text, control tokens visible."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def spans(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text, and for each id the character at which it begins. An id that continues a character begins at
        that character."""
        if self._octets is None:
            return self._spans_by_decoding(ids)
        starts, octets = [], bytearray()
        for id in ids:
            starts.append(len(octets))
            octets += self._octets.get(id, b"")
        text = octets.decode(errors="replace")
        if len(text) == len(octets):  # ASCII: a byte is a character
            return text, starts
        place, places = 0, []  # the character that each byte is a part of
        for i, character in enumerate(text):
            width = _width(octets, place, character)
            places += [i] * width
            place += width
        places.append(len(text))
        return text, [places[start] for start in starts]

    def _spans_by_decoding(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        text, starts, window = "", [], 0
        for i in range(len(ids)):
            starts.append(len(text))
            before = self.text(ids[window:i])
            now = self.text(ids[window : i + 1])
            if now.endswith(HALF) and i + 1 < len(ids) and i - window < 8:
                continue
            text += now[len(before.rstrip(HALF)) :] if now.startswith(before.rstrip(HALF)) else now[len(before) :]
            window = max(0, i - 3) if not now.endswith(HALF) else i + 1
        return text, starts

    def _require_plain(self) -> None:
        """Raise BadTokenizer if the model itself, without added tokens, encodes a spelling as a control token."""
        for text in self.control:
            if self.control_ids & set(self.plain(f"a {text}{text}b")):
                raise BadTokenizer(
                    f"tokenizer.json: its model writes the text {text!r} as a control token even without added tokens; allowed: "
                    "a byte-level BPE, whose control tokens are added tokens"
                )


def _escaped(guard: str) -> str:
    return json.dumps(guard)[1:-1]


def _pattern(token: Any) -> str:
    """Return the pattern by which the tokenizer finds an added token. Some tokens include the white space around them."""
    space = r"\s*"
    return f"{space * token.lstrip}{re.escape(token.content)}{space * token.rstrip}"


def _octets_of(words: Mapping[str, int], spelling: Mapping[int, str]) -> dict[int, bytes]:
    """Return the bytes of each id of a byte-level vocabulary."""
    table = str.maketrans({character: chr(byte) for character, byte in _byte_table().items()})
    octets = {}
    for text, id in words.items():
        try:
            octets[id] = text.encode() if id in spelling else text.translate(table).encode("latin-1")
        except UnicodeEncodeError:  # no word of bytes
            octets[id] = text.encode()
    return octets


def _byte_table() -> dict[str, int]:
    """Return character -> byte as byte-level vocabularies map them: printable bytes stand for themselves, the others begin at
    U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _width(octets: bytearray, at: int, character: str) -> int:
    """Return how many bytes were decoded to the character at this place; for a replacement character, how many it replaces."""
    if character != HALF:
        return len(character.encode())
    if octets[at : at + 3] == HALF.encode():
        return 3
    n = 1  # Python replaces the longest beginning of a character by one replacement
    while n < 3 and at + n < len(octets) and bytes(octets[at : at + n + 1]).decode(errors="replace") == HALF:
        n += 1
    return n
