"""Search ranks by words, and by meaning where a model is at hand."""

from __future__ import annotations

import json
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from shared.environments.repository import embeddings
from shared.environments.repository import index as index_module
from shared.environments.repository.index import Index, Indexes, words
from shared.environments.tools import Hit

FILES = {
    "http.py": "\n".join(
        ["# one"] * 50 + ["def parseHTTPHeader(line):", "    return line.split(':')"] + ["# end"] * 50
    ),
    "car.py": "def drive():\n    return 'automobile'\n",
    "fruit.py": "def eat():\n    return 'apple'\n",
    "empty.py": "",
    "data.bin": "\0\1",
}


def load(tree: Path, cache: Path, paths: list[str]) -> Index:
    """The index as another process would load it."""
    return Indexes(cache).of(tree, paths)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    for path, text in FILES.items():
        (folder / path).write_text(text)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Four words in two meanings."""
    folder = tmp_path / "model"
    folder.mkdir()
    vocabulary = {"vehicle": 0, "automobile": 1, "food": 2, "apple": 3, "[UNK]": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(
        {"embeddings": np.array([[1, 0], [1, 0], [0, 1], [0, 1], [0, 0]], np.float32)}, folder / "model.safetensors"
    )
    return folder


def test_words_of_code_are_those_of_its_names() -> None:
    assert words("parseHTTPHeader parse_header2") == ["parse", "http", "header", "parse", "header", "2"]


def test_chunks_are_found_by_words_and_do_not_overlap(tree: Path, tmp_path: Path) -> None:
    index = load(tree, tmp_path / "cache", sorted(FILES))
    hits = index.search("parse header line", 5)
    assert hits[0].path == "http.py"
    assert hits[0].first <= 51 <= hits[0].last
    assert all(one.last < other.first or other.last < one.first for one in hits for other in hits if one != other)
    assert index.search("", 5) == index.search("nowhere", 5) == []
    assert load(tree, tmp_path / "cache", []).search("drive", 1) == [Hit("car.py", 1, 3)]  # from the cache


def test_a_tree_without_text_has_an_empty_index(tree: Path, tmp_path: Path) -> None:
    assert load(tree, tmp_path / "cache", ["data.bin", "empty.py"]).search("x", 3) == []


def test_meaning_finds_what_words_do_not(
    tree: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(tree, tmp_path / "cache", sorted(FILES)).search("vehicle", 3) == []
    monkeypatch.setenv(embeddings.VARIABLE, str(model))
    index = load(tree, tmp_path / "cache", sorted(FILES))
    assert [hit.path for hit in index.search("vehicle", 3)] == ["car.py"]
    assert {hit.path for hit in index.search("food drive", 3)} == {"fruit.py", "car.py"}
    assert len(list((tmp_path / "cache" / "indexes").glob("tree*"))) == 2


def test_a_folder_that_holds_no_model_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match=r"ETUDE_EMBEDDINGS: .*model holds no static embeddings"):
        embeddings.Embeddings(model)


def test_indexing_adds_no_line_of_its_library_to_a_service_s_log(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tree, tmp_path / "cache", list(FILES)).search("drive", 1)
    assert not caplog.records


def test_an_index_of_another_format_is_not_used(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(tree, tmp_path / "cache", ["car.py"]).search("apple", 1) == []
    monkeypatch.setattr(index_module, "FORMAT", index_module.FORMAT + 1)
    assert load(tree, tmp_path / "cache", ["fruit.py"]).search("apple", 1) == [Hit("fruit.py", 1, 3)]


def test_a_process_loads_an_index_once_for_all_that_search(tree: Path, tmp_path: Path) -> None:
    indexes = Indexes(tmp_path / "cache")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: indexes.of(tree, list(FILES)), range(8)))
    assert len(set(map(id, found))) == 1


def test_making_an_index_keeps_no_text_in_memory(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    line = " ".join(f"word{n % 500}" for n in range(20))
    for number in range(4):
        (folder / f"{number}.py").write_text(f"{line}\n" * 1500)
    indexes = Indexes(tmp_path / "cache")
    tracemalloc.start()
    try:
        chunks = len(indexes.of(folder, [f"{number}.py" for number in range(4)]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert chunks == 200
    assert peak / chunks < 30_000  # a chunk has 1600 words; as strings they take 80 kB
