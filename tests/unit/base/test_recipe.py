"""The whole recipe on a pack in miniature: seconds of training, every part real."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from services.trainer.base import leak, streams
from services.trainer.base.cli import app
from services.trainer.base.samples import Samples
from shared.model import load_checkpoint
from shared.problems.signatures import fingerprint, read_signatures, write_signatures
from shared.renderers.formats.compact_1 import Compact


@pytest.fixture(scope="module")
def made(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    work, out = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("out")
    arguments = [
        "--pack",
        pack,
        "--work",
        work,
        "--out",
        out,
        "--minutes",
        0.1,
        "--processes",
        1,
        "--sandbox",
        "process",
    ]
    result = CliRunner().invoke(app, ["make", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return work, out


def test_a_checkpoint_is_shipped_with_all_that_belongs_to_it(made: tuple[Path, Path]) -> None:
    work, out = made
    model, format = load_checkpoint(out), Compact.load(out)
    assert format.vocab_size == model.config.vocab_size == 2048
    assert (out / "model.safetensors").stat().st_size <= 12 << 20
    card = (out / "README.md").read_text()
    assert "## Leak report" in card
    assert re.search(r"Agentic, dev split, .*\n\n\| \| \|\n\|---\|---\|\n\| problems \| [1-9]", card)
    assert re.search(r"\n\| pass_at_1 \| [\d.e-]+ \|\n", card)
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    phases = [json.loads(line)["phase"] for line in (work / "losses.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(phases)) == ["pretrain", "sft", "mtp"]


def test_mtp_distillation_leaves_the_trunk_bit_for_bit(made: tuple[Path, Path]) -> None:
    work, _ = made
    before, after = load_checkpoint(work / "sft").state_dict(), load_checkpoint(work / "mtp").state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith("mtp_layers.") for name in moved)


def test_signatures_name_every_function_of_the_streams(made: tuple[Path, Path]) -> None:
    work, out = made
    known = read_signatures(out / "signatures.npz")
    sources = json.loads((work / "streams" / "sources.json").read_text())
    assert all(known.has_near(*fingerprint(source)) for source in sources[::20])


def test_the_leak_report_is_clean_and_finds_a_planted_copy(made: tuple[Path, Path], pack: Path, tmp_path: Path) -> None:
    work, _ = made
    assert leak.of_streams(pack, work / "streams").clean
    planted = "def renamed(values, k):\n    return values[-k:] if k > 0 else []"
    sources = json.loads((work / "streams" / "sources.json").read_text())
    (tmp_path / "sources.json").write_text(json.dumps([*sources, planted]))
    report = leak.of_streams(pack, tmp_path)
    assert not report.clean
    assert (report.splits["rl"].exact, report.splits["held_out"].near) == (1, 0)


def test_without_the_streams_the_signatures_give_the_same_report(
    made: tuple[Path, Path], pack: Path, tmp_path: Path
) -> None:
    work, out = made
    streamed, signed = leak.of_streams(pack, work / "streams"), leak.of_signatures(pack, out / "signatures.npz")
    assert (signed.clean, signed.splits) == (streamed.clean, streamed.splits)
    sources = json.loads((work / "streams" / "sources.json").read_text())
    assert signed.streams == len(set(map(fingerprint, sources)))  # two sources may differ in names alone
    planted = "def renamed(values, k):\n    return values[-k:] if k > 0 else []"
    write_signatures([planted], tmp_path / "signatures.npz")
    report = leak.of_signatures(pack, tmp_path / "signatures.npz")
    assert (report.clean, report.splits["rl"].exact, report.splits["held_out"].near) == (False, 1, 0)


def test_on_a_fresh_clone_leaks_are_looked_for_in_what_is_shipped(pack: Path, tmp_path: Path) -> None:
    arguments = ["leaks", "--pack", str(pack), "--work", str(tmp_path / "none"), "--json", str(tmp_path / "leaks.json")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    found = json.loads((tmp_path / "leaks.json").read_text())
    assert result.exit_code == (0 if found["clean"] else 1)
    assert found["source"].endswith("etude/data/base/signatures.npz")
    assert found["streams"] > 100_000


@pytest.mark.nightly
def test_streams_are_equal_for_equal_pack_and_seed(made: tuple[Path, Path], pack: Path, tmp_path: Path) -> None:
    work, _ = made
    streams.make(pack, tmp_path, 1, 1, "process", streams.Draws())
    for name in ("code", "denoise", "traces", "validation"):
        again, first = Samples.load(tmp_path / f"{name}.npz"), Samples.load(work / "streams" / f"{name}.npz")
        assert (again.tokens == first.tokens).all()
        assert (again.weights == first.weights).all()
    assert (tmp_path / "tokenizer.json").read_bytes() == (work / "streams" / "tokenizer.json").read_bytes()


def test_sft_goes_on_from_a_checkpoint_with_its_own_tokenizer(
    made: tuple[Path, Path], pack: Path, tmp_path: Path
) -> None:
    _, out = made
    arguments = ["--from", out, "--pack", pack, "--out", tmp_path / "more", "--minutes", 0.03, "--processes", 1]
    result = CliRunner().invoke(app, ["sft", *map(str, arguments), "--sandbox", "process"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "more" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    before, after = load_checkpoint(out), load_checkpoint(tmp_path / "more")
    assert not torch.equal(before.embed_tokens.weight, after.embed_tokens.weight)


def test_a_probe_plays_dev_problems_to_their_end_and_refuses_held_out(made: tuple[Path, Path], pack: Path) -> None:
    _, out = made
    arguments = ["probe", str(out), "--pack", str(pack), "--samples", "2", "--count", "4", "--sandbox", "process"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    figures = json.loads(result.output)
    assert figures["problems"] == 4
    assert 0 <= figures["pass_at_1"] <= figures["best"] <= 1
    refused = CliRunner().invoke(app, [*arguments, "--split", "held_out"])
    assert (refused.exit_code, "found 'held_out'" in refused.output) == (2, True), refused.output


def test_a_directory_that_is_no_pack_is_refused_by_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["make", "--pack", str(tmp_path), "--work", str(tmp_path / "w")])
    assert result.exit_code == 2
    assert "etude tasks mutate" in result.output
