"""Token files, the order of sequences, and what a phase refuses."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import phase_data
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.trainer import schedule
from services.trainer.phases import data_cli
from services.trainer.phases.config import BadPhase, Phase
from services.trainer.phases.data import Feed, Pieces, Place
from services.trainer.phases.heldout import count, windows
from services.trainer.phases.phase import run
from services.trainer.phases.report import fit
from services.trainer.phases.screen import Silent
from services.trainer.phases.shards import BadShards, Shards, write

DOCUMENTS = st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30), min_size=1, max_size=12)


def written(folder: Path, documents: list[list[int]], shard_tokens: int) -> Shards:
    folder.mkdir(parents=True, exist_ok=True)
    about = {"tokenizer": "t", "vocab_size": 2**32, "begin": "", "end": "e"}
    write(folder, ((np.array(d, np.uint32), 2 * len(d)) for d in documents), **about, shard_tokens=shard_tokens)
    return Shards.open(folder, verify=True)


@settings(max_examples=40, deadline=None)
@given(documents=DOCUMENTS, shard_tokens=st.integers(1, 40))
def test_tokens_come_back_as_they_were_written(
    documents: list[list[int]], shard_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shards = written(tmp_path_factory.mktemp("shards"), documents, shard_tokens)
    found = [shards.tokens(shards.start(i), int(shards.ends_D[i])).tolist() for i in range(len(shards))]
    assert found == documents
    assert shards.tokens(0, shards.manifest.tokens).tolist() == list(chain.from_iterable(documents))


@settings(max_examples=40, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(2, 12), seed=st.integers(0, 2**63 - 1))
def test_an_epoch_has_every_target_once_and_no_piece_crosses_documents(
    documents: list[list[int]], length: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shards = written(tmp_path_factory.mktemp("shards"), documents, 17)
    pieces = Pieces.of([shards, shards], length)
    found = [pieces.sequence(i) for i in range(len(pieces))]
    assert all(len(s.tokens_T) - 1 <= length and not s.sampled_T[0] for s in found)
    targets = [s.tokens_T[1:].tolist() for s in found]
    assert sum(map(len, targets)) == pieces.targets == 2 * sum(len(d) - 1 for d in documents)
    assert list(chain.from_iterable(targets)) == list(chain.from_iterable(d[1:] for d in documents)) * 2


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(2, 20), min_size=1, max_size=9), steps=st.integers(1, 8), at=st.integers(0, 7))
def test_a_feed_goes_on_from_its_place_as_if_it_had_never_stopped(
    sizes: list[int], steps: int, at: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shards = written(tmp_path_factory.mktemp("shards"), [list(range(n)) for n in sizes], 1000)
    pieces = Pieces.of([shards], 5)
    feed = Feed(pieces, 7, 11)
    places, batches = [], []
    for _ in range(steps):
        places.append(feed.place)
        batches.append([s.tokens_T.tolist() for s in feed.batch()])
    again = Feed(pieces, 7, 11, places[at % steps])
    assert [s.tokens_T.tolist() for s in again.batch()] == batches[at % steps]
    assert places[0] == Place()


def test_an_epoch_is_a_permutation_of_its_own(tmp_path: Path) -> None:
    shards = written(tmp_path, [[i, i] for i in range(30)], 1000)
    feed = Feed(Pieces.of([shards], 4), 1, 30)
    first, second = ([int(s.tokens_T[0]) for s in feed.batch()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second != list(range(30))


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(2, 90), window=st.integers(2, 20), stride=st.integers(1, 20))
def test_a_rolling_window_predicts_every_token_once(
    tokens: int, window: int, stride: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stride = min(stride, window)
    shards = written(tmp_path_factory.mktemp("shards"), [list(range(tokens))], 1000)
    found = list(windows(shards, window, stride))
    assert np.concatenate([s.tokens_T[s.sampled_T] for s in found]).tolist() == list(range(1, tokens))
    assert all(len(s.tokens_T) - 1 <= window for s in found)
    assert len(found) == count(tokens, window, stride)


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    written(tmp_path / "a", [[1, 2, 3]], 100)
    (tmp_path / "b").mkdir()
    with pytest.raises(BadShards, match="found no token in the corpus; allowed: at least one document"):
        write(tmp_path / "b", [], tokenizer="t", vocab_size=1, begin="", end="e")
    with pytest.raises(BadShards, match=r"found no manifest.json; allowed: a folder that `etude data tokenize` wrote"):
        Shards.open(tmp_path / "nowhere")
    (tmp_path / "a" / "0000.bin").write_bytes(b"short")
    with pytest.raises(BadShards, match=r"0000.bin: found 5 bytes; allowed: 12 bytes"):
        Shards.open(tmp_path / "a")


@given(progress=st.floats(0, 1), floor=st.floats(0, 1), decay=st.floats(0, 1))
@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd", "linear"])
def test_schedules_fall_from_one_to_the_floor(kind: schedule.Kind, progress: float, floor: float, decay: float) -> None:
    def at(x: float) -> float:
        return schedule.share(kind, x, floor=floor, decay=decay)

    assert at(0.0) == 1.0
    assert floor - 1e-12 <= at(progress) <= 1.0 + 1e-12
    if kind == "wsd":
        assert progress >= 1 - decay or at(progress) == pytest.approx(1.0)
    if kind != "constant" and decay > 0:
        assert at(1.0) == pytest.approx(floor)
        assert at(min(1.0, progress + 0.1)) <= at(progress) + 1e-12


def test_a_fit_of_loss_against_log_compute_needs_three_points() -> None:
    line = fit([(10.0**k, 5 - 0.3 * k) for k in (10, 11, 12, 13)])
    assert line is not None
    assert (line.slope, line.intercept, line.r2) == (pytest.approx(-0.3), pytest.approx(5.0), pytest.approx(1.0))
    assert fit([(0.0, 4.0), (1e10, 3.0), (1e11, 2.0)]) is None


@pytest.mark.parametrize(
    ("phase", "old", "new", "says"),
    [
        ("cpt", "step_tokens = 120", "step_tokens = 0", "train.step_tokens: found 0; allowed: 1 or more"),
        ("cpt", "step_tokens = 120", "step_token = 120", "found 'train.step_token'; allowed: balance, betas"),
        ("cpt", "window = 48", "window = 'x'", "measure.window: found 'x'; allowed: a whole number"),
        ("cpt", "stride = 24", "stride = 49", "measure.stride: found 49; allowed: 1 to measure.window, 48"),
        ("cpt", "length = 48", "length = 257", "data.length: found 257; allowed: 2 to 256, the checkpoint's context"),
        (
            "cpt",
            "window = 48",
            "window = 257",
            "measure.window: found 257; allowed: 2 to 256, the checkpoint's context",
        ),
        ("cpt", 'checkpoint = "start"', "", "checkpoint: found nothing; allowed: a path"),
        ("cpt", '"corpus"', '"nowhere"', "nowhere: found no manifest.json"),
        ("cpt", 'tokens = ["corpus"]', "", "data.tokens: found none; allowed: one folder or more"),
        ("extend", "length = 48", "length = 50", "model.rope: found nothing; allowed: a table with type"),
        ("sft", "length = 48", "length = 50", "data.tokens: found 1; allowed: none in phase sft"),
        ("cpt", "[measure]", 'mtp = "on"\n[measure]', "train.mtp: found 'on'; allowed: 'auto', 'off'"),
        ("cpt", 'out = "made"', 'out = "start"', "out: found something in "),
    ],
)
def test_what_a_phase_refuses_is_named_and_nothing_is_written(
    phase: Phase, old: str, new: str, says: str, tmp_path: Path
) -> None:
    phase_data.pretraining(tmp_path)
    text = phase_data.PRETRAIN.format(out="made")
    assert old in text
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadPhase) as raised:
        run(phase_data.configured(tmp_path, phase, text.replace(old, new, 1)), phase, Silent())
    assert says in str(raised.value)
    assert sorted(tmp_path.iterdir()) == before


def test_another_architecture_and_another_tokenizer_are_named(tmp_path: Path) -> None:
    config = phase_data.pretraining(tmp_path)
    other = phase_data.checkpoint(tmp_path / "wide", hidden_size=64)
    (tmp_path / "start" / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(BadPhase, match=r"tensor 'model.embed_tokens.weight' is \(264, 64\); config.json asks for"):
        run(config, "cpt", Silent())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<|other|>"
    (tmp_path / "start" / "model.safetensors").unlink()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = phase_data.PRETRAIN.format(out="made").replace('"start"', '"wide"')
    with pytest.raises(BadPhase, match="corpus was encoded with another tokenizer than the checkpoint's"):
        run(phase_data.configured(tmp_path, "cpt", text), "cpt", Silent())


def test_a_folder_becomes_tokens_and_a_held_out_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = phase_data.checkpoint(tmp_path / "start")
    source = tmp_path / "src"
    (source / ".git").mkdir(parents=True)
    (source / ".git" / "x.py").write_text("hidden")
    for i, text in enumerate(phase_data.TEXTS):
        (source / f"{i}.py").write_text(text)
    (source / "again.py").write_text(phase_data.TEXTS[0])
    (source / "data.bin").write_bytes(b"\0\1")
    (source / "mark.py").write_text("'<|endoftext|>'")
    command = "tokenize src --tokenizer start --out made --held-out held --share 0.3"
    done = CliRunner().invoke(data_cli.app, command.split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    made, held = Shards.open(tmp_path / "made", verify=True), Shards.open(tmp_path / "held", verify=True)
    assert len(made) + len(held) == len(phase_data.TEXTS) + 1
    assert len(held) > 0
    end = 256  # <|endoftext|>, once for each document: no text spells it
    assert sum(int((s.tokens(0, s.manifest.tokens) == end).sum()) for s in (made, held)) == len(made) + len(held)
    assert start.exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("tokenize empty --tokenizer start --out made", "empty: found no token in the corpus; allowed: at least one"),
        ("tokenize nowhere --tokenizer start --out made", "nowhere: found nothing there; allowed: a folder"),
        ("tokenize empty --tokenizer nowhere --out made", "nowhere: found no tokenizer.json"),
        ("tokenize empty --tokenizer start --out start", "--out: found something in start"),
        ("tokenize empty --tokenizer start --out made --end <x>", "--end: found '<x>'; allowed: a control token"),
        ("tokenize bad.jsonl --tokenizer start --out made", "bad.jsonl, line 2: text: found None; allowed: a text"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_named_and_nothing_is_written(
    command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    phase_data.checkpoint(tmp_path / "start")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "blank.txt").write_text(" \n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    before = sorted(tmp_path.iterdir())
    done = CliRunner().invoke(data_cli.app, command.split(), catch_exceptions=False)
    assert done.exit_code == 2
    assert says in done.stderr
    assert sorted(tmp_path.iterdir()) == before
