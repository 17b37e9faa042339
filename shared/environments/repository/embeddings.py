"""Static embeddings of text: the mean of its tokens' vectors, from a folder in the format of model2vec.

The folder has `tokenizer.json` and `model.safetensors` with `embeddings` [V, D]; newer ones also `weights` [V] and `mapping`
[V]. No such model comes with the project: ETUDE_EMBEDDINGS names one, and without it `search` ranks by words alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

VARIABLE = "ETUDE_EMBEDDINGS"
MAX_TOKENS = 512  # of one text


class Embeddings:
    """`name`: tells models apart, for caches."""

    def __init__(self, folder: Path) -> None:
        """Load the model in `folder`. Raises ValueError if the folder holds no such model, OSError."""
        import xxhash
        from safetensors.numpy import load
        from tokenizers import Tokenizer

        data = (folder / "model.safetensors").read_bytes()
        self.name = xxhash.xxh3_64_hexdigest(data)
        try:
            tensors = load(data)
            vectors_VD = tensors["embeddings"].astype(np.float32)
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise ValueError(f"{VARIABLE}: {folder} holds no static embeddings: {error}") from None
        rows_V = tensors.get("mapping", np.arange(len(vectors_VD)))
        weights_V = tensors.get("weights", np.ones(len(rows_V))).astype(np.float32)
        self._vectors_VD = vectors_VD[rows_V] * weights_V[:, None]
        if self._tokenizer.get_vocab_size() > len(self._vectors_VD):
            raise ValueError(
                f"{VARIABLE}: {folder}: found {len(self._vectors_VD)} vectors for {self._tokenizer.get_vocab_size()} tokens"
            )
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors float32 [N, D]; zeros for a text without tokens."""
        result_ND = np.zeros((len(texts), self._vectors_VD.shape[1]), np.float32)
        for at, encoding in enumerate(self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)):
            if encoding.ids:
                mean_D = self._vectors_VD[encoding.ids].mean(axis=0)
                result_ND[at] = mean_D / max(float(np.linalg.norm(mean_D)), 1e-9)
        return result_ND


@functools.cache
def _loaded(folder: str) -> Embeddings:
    return Embeddings(Path(folder))


def configured() -> Embeddings | None:
    """Return the model that the setting names, or None where it is not set. Raises ValueError, OSError."""
    folder = os.environ.get(VARIABLE, "")
    return _loaded(folder) if folder else None
