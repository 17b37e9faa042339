"""A chat format that needs no checkpoint: ChatML over single bytes. Scripts and chat endpoints are written in it.

Its ids mean nothing to any model. They let the whole agent loop, the recorder and `show` work where no exact ids exist.
"""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.renderers.formats.chatml import BEGIN, END, Card, ChatML
from shared.renderers.vocabulary import Vocabulary

CONTEXT = 1 << 22  # bytes: no limit of its own; the endpoint has one
BYTES_PER_TOKEN = 4  # of English and code, about: limits in tokens are held in bytes, times this


@functools.cache
def builtin() -> ChatML:
    """Return the renderer. It has one id for each byte, and the control tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: id for id, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (BEGIN, END)])
    return ChatML(Vocabulary(tokenizer), Card(context=CONTEXT, thinking="model"))
