"""Search over a tree: its files in chunks, ranked by BM25 and, where a model is configured, by static embeddings.

The index lies in the cache, one for each tree, model and FORMAT. Two rankings are joined by reciprocal ranks.
"""

from __future__ import annotations

import json
import logging
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from shared.environments.repository.embeddings import Embeddings, configured
from shared.environments.repository.kept import Kept, sweep, used
from shared.environments.tools import Hit
from shared.scratch import scratch

FORMAT = 2  # of an index in the cache; raise it with every change of chunks, words or files
CHUNK_LINES, STEP_LINES = 40, 30  # chunks overlap, so that no function is cut in all of them
MAX_FILE = 1 << 20  # bytes; larger files are data
MAX_CHUNKS = 200_000
KEPT_CHUNKS = 50_000  # of all indexes that a process holds in memory, some 2 kB each
_BATCH = 1024  # texts that are embedded at a time
_FUSION = 60  # as in the paper on reciprocal rank fusion: how little the first rank counts above the tenth
_WORD = re.compile(r"[A-Za-z]+|\d+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class Index:
    """The index of one tree, loaded. `embed`: the model that its vectors come from; None: it has none."""

    def __init__(self, folder: Path, embed: Embeddings | None) -> None:
        bm25s = _bm25s()
        self._chunks = [Hit(*row) for row in json.loads((folder / "chunks.json").read_text())]
        self._ranks = bm25s.BM25.load(str(folder / "bm25")) if self._chunks else None
        self._embed, self._vectors_ND = embed, np.load(folder / "vectors.npy") if embed and self._chunks else None

    def __len__(self) -> int:
        return len(self._chunks)

    def search(self, query: str, most: int) -> list[Hit]:
        """Return the best chunks, none overlapping another."""
        scores: defaultdict[int, float] = defaultdict(float)
        for order in (self._by_words(query, most * 8), self._by_meaning(query, most * 8)):
            for rank, number in enumerate(order):
                scores[number] += 1 / (_FUSION + rank)
        hits: list[Hit] = []
        for number in sorted(scores, key=lambda one: (-scores[one], one)):
            hit = self._chunks[number]
            if not any(_overlap(hit, other) for other in hits):
                hits.append(hit)
        return hits[:most]

    def _by_words(self, query: str, most: int) -> list[int]:
        terms = words(query)
        if self._ranks is None or not terms:
            return []
        numbers, scores = self._ranks.retrieve([terms], k=min(len(self._chunks), most), show_progress=False)
        return [int(number) for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]

    def _by_meaning(self, query: str, most: int) -> list[int]:
        if self._embed is None or self._vectors_ND is None:
            return []
        scores_N = self._vectors_ND @ self._embed([query])[0]
        best = np.argsort(-scores_N, kind="stable")[:most]
        return [int(number) for number in best if scores_N[number] > 0]


def _overlap(one: Hit, other: Hit) -> bool:
    return one.path == other.path and one.first <= other.last and other.first <= one.last


class Indexes:
    """The indexes of one process, below its cache. Methods block: call them in a thread."""

    def __init__(self, cache: Path) -> None:
        self._folder = cache.absolute() / "indexes"
        self._kept: Kept[Index] = Kept(KEPT_CHUNKS, len)

    def of(self, tree: Path, paths: Sequence[str]) -> Index:
        """Return the index of a tree; make it if there is none. `paths`: the tree's regular files. Raises OSError,
        ValueError."""
        embed = configured()
        folder = self._folder / (f"{tree.name}-{FORMAT}" + (f"-{embed.name}" if embed else ""))
        return self._kept.get(folder, lambda: _loaded(folder, tree, paths, embed))


def _loaded(folder: Path, tree: Path, paths: Sequence[str], embed: Embeddings | None) -> Index:
    if not folder.is_dir():
        sweep(folder.parent)
        with scratch(folder.parent, "indexing-") as draft:
            _make(tree, draft / "index", paths, embed)
            try:
                (draft / "index").rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
    used(folder)
    return Index(folder, embed)


def _bm25s() -> ModuleType:
    """Import bm25s, and keep its news from our logs: it sets its logger to DEBUG, and its lines are no JSON."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def _make(tree: Path, draft: Path, paths: Sequence[str], embed: Embeddings | None) -> None:
    """Write the index. Of each chunk only the numbers of its words stay in memory, not its text."""
    numbers = {"": 0}  # word -> number; bm25s wants one for the empty word
    hits: list[tuple[str, int, int]] = []
    chunks_words: list[array[int]] = []
    texts: list[str] = []
    vectors: list[np.ndarray] = []
    for path, (first, last, text) in ((one, chunk) for one in paths for chunk in _chunks(tree / one)):
        if len(hits) == MAX_CHUNKS:
            break
        hits.append((path, first, last))
        chunks_words.append(array("i", (numbers.setdefault(w, len(numbers)) for w in words(f"{path} {text}"))))
        if embed:
            texts.append(text)
            if len(texts) == _BATCH:
                vectors.append(embed(texts))
                texts.clear()
    draft.mkdir()
    (draft / "chunks.json").write_text(json.dumps(hits))
    if not hits:
        return
    ranks = _bm25s().BM25()
    ranks.index((chunks_words, numbers), show_progress=False)
    ranks.save(str(draft / "bm25"), show_progress=False)
    if embed:
        np.save(draft / "vectors.npy", np.concatenate([*vectors, embed(texts)]))


def _chunks(path: Path) -> Iterator[tuple[int, int, str]]:
    if path.stat().st_size > MAX_FILE:
        return
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        return
    lines = data.decode(errors="replace").split("\n")
    for first in range(0, max(1, len(lines) - (CHUNK_LINES - STEP_LINES)), STEP_LINES):
        piece = lines[first : first + CHUNK_LINES]
        if any(line.strip() for line in piece):
            yield first + 1, first + len(piece), "\n".join(piece)


def words(text: str) -> list[str]:
    """Return the words of a text or of code: `parseHTTPHeader` and `parse_header` both have `parse` and `header`."""
    return [word.lower() for word in _WORD.findall(_CAMEL.sub(" ", text))]
