"""Trains the BPE of the compact format.

Words break where a repair may: identifiers, single digits, operators and brackets are words of their own, so that a
mutated operator or variable is a token of its own and a span edit copies whole tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.renderers.formats.compact_1 import SPECIAL

VOCABULARY = 2048
_WORD = (
    r" ?[A-Za-z_]+"
    r"| ?[0-9]"
    r"| ?(?:\*\*=|//=|<<=|>>=|[<>=!+\-*/%&|^]=|\*\*|//|<<|>>)"
    r"|\(\)|\[\]|[)\]]:|\)\)| +(?= )"
    r"| ?[^\sA-Za-z_0-9]"
    r"|\s"
)


def train(texts: Iterable[str], out: Path, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Deterministic for the same texts in the same order. Writes `out` and returns the tokenizer."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(
            f"the texts give a vocabulary of {tokenizer.get_vocab_size()} entries; the model expects {vocabulary}: "
            "train on more text"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out))
    return tokenizer
