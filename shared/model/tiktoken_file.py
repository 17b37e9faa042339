"""A tokenizer in tiktoken's form (`tiktoken.model`: a token in base64 and its rank on each line) as a tokenizer.json.

tiktoken takes a piece of text that is a token as it is; any other piece it merges, lowest rank first. A byte-level BPE does
the same if it knows every way to split a token into two others, in the order of their ranks.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from shared.model.fields import UnknownModel

FILE = "tiktoken.model"


def write_tokenizer(folder: Path, *, pattern: str, reserved: int) -> None:
    """Write tokenizer.json beside the folder's tiktoken.model, and make its tokenizer_config.json name a class that reads it.
    `pattern` splits text into pieces. `reserved`: how many special tokens follow the ranks; those that tokenizer_config.json
    does not name are `<|reserved_token_ID|>`. Raises UnknownModel."""
    path = folder / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        special = {int(i): about for i, about in config.get("added_tokens_decoder", {}).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UnknownModel(f"{path.name}: cannot be read ({error}); it names the special tokens of {FILE}") from None
    tokenizer_of(read_ranks(folder / FILE), special, pattern, reserved).save(str(folder / "tokenizer.json"))
    rest = {name: value for name, value in config.items() if name not in ("auto_map", "added_tokens_decoder")}
    path.write_text(json.dumps({**rest, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank; the ranks are 0, 1, 2, … Raises UnknownModel."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError) as error:
        raise UnknownModel(f"{path.name}: no tiktoken file ({error}); expected lines of BASE64 RANK") from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise UnknownModel(f"{path.name}: {len(ranks)} tokens; expected one for each rank from 0")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UnknownModel(f"{path.name}: the byte {missing[0]:#04x} is no token; expected all 256")
    return ranks


def tokenizer_of(
    ranks: Mapping[bytes, int], special: Mapping[int, Mapping[str, Any]], pattern: str, reserved: int
) -> Tokenizer:
    vocabulary = {_text(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(ranks), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    first, end = len(ranks), len(ranks) + reserved
    if strange := sorted(i for i in special if not first <= i < end):
        raise UnknownModel(f"tokenizer_config.json: added token {strange[0]}; allowed: {first} to {end - 1}")
    for i in range(first, end):  # each gets the next id
        about = special.get(i, {})
        content = about.get("content", f"<|reserved_token_{i}|>")
        tokenizer.add_tokens([AddedToken(content, normalized=False, special=bool(about.get("special", True)))])
        if tokenizer.token_to_id(content) != i:
            raise UnknownModel(f"tokenizer_config.json: added token {i} is {content!r:.80}, which is a token already")
    return tokenizer


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    found = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            left, right = ranks.get(token[:at]), ranks.get(token[at:])
            if left is not None and right is not None:
                found.append((rank, left, right, token[:at], token[at:]))
    return [(_text(left), _text(right)) for *_, left, right in sorted(found)]


def _alphabet() -> dict[int, str]:
    """Byte-level BPE's letter for each byte: printable ones stand for themselves, others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


_LETTERS = _alphabet()


def _text(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)
