"""`etude eval`: a checkpoint that cannot be measured is refused at once, and what failed leaves its logs."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from etude import evaluate, status
from etude.demo.prepare import BASE, DemoError
from etude.evaluate import Split, require_servable, temporary_state
from etude.exchange import NotExchanged

BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 512}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the base policy that may be spoilt."""
    return shutil.copytree(BASE, tmp_path / "copy")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def platform_that_ends_with(error: BaseException | None) -> None:
    with temporary_state() as state:
        (state / "objects").mkdir()
        (state / "bus.db").touch()
        (state / "logs").mkdir()
        (state / "logs" / "rollout.log").write_text("no inference\n")
        if error is not None:
            raise error


def test_the_base_policy_can_be_measured(checkpoint: Path) -> None:
    require_servable(BASE)
    require_servable(checkpoint)


def test_a_foreign_checkpoint_is_refused_before_a_service_starts(
    tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "bert"
    foreign.mkdir()
    (foreign / "config.json").write_text(json.dumps(BERT))
    assert evaluate.run(foreign, Split(tmp_path, "held_out"), 1, None, 0) == 1
    said = capsys.readouterr().err
    assert "model_type" in said
    assert "'bert'" in said
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (None, r"no etude\.json.*allowed: compact-1.*etude import"),
        ({"format": "chatml", "context": 512}, r"'chatml'; known: compact-1"),
        ({"format": "compact-1"}, r"etude\.json has no 'context'"),
    ],
)
def test_a_checkpoint_whose_chat_format_nobody_knows_is_refused(
    checkpoint: Path, card: dict[str, str] | None, said: str
) -> None:
    (checkpoint / "etude.json").unlink()
    if card is not None:
        (checkpoint / "etude.json").write_text(json.dumps(card))
    with pytest.raises(DemoError, match=said):
        require_servable(checkpoint)


def test_a_tokenizer_of_another_model_is_refused(checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"another {i}": len(vocabulary) + i for i in range(64)}
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DemoError, match=r"tokenizer\.json has \d+ tokens; config\.json has room for \d+"):
        require_servable(checkpoint)


def test_what_failed_leaves_the_services_logs_and_says_where(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DemoError) as failure:
        platform_that_ends_with(DemoError("it failed"))
    (kept,) = scratch.iterdir()
    assert [path.name for path in kept.iterdir()] == ["logs"]
    assert f"`etude logs --state {kept}`" in failure.value.__notes__[0]
    status.show_logs(kept, "rollout", follow=False, lines=5)
    assert "no inference" in capsys.readouterr().out


def test_what_ended_well_or_by_ctrl_c_leaves_nothing(scratch: Path) -> None:
    platform_that_ends_with(None)
    with pytest.raises(KeyboardInterrupt):
        platform_that_ends_with(KeyboardInterrupt())
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("context", [-5, 100_000, True, "512"])
def test_a_context_that_the_model_does_not_have_is_refused(checkpoint: Path, context: object) -> None:
    card = json.loads((checkpoint / "etude.json").read_text())
    (checkpoint / "etude.json").write_text(json.dumps({**card, "context": context}))
    with pytest.raises(NotExchanged, match=f"context: found {context!r}; allowed: 1 to max_position_embeddings"):
        require_servable(checkpoint)


def test_a_configuration_that_is_no_object_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(NotExchanged, match="found list; allowed: a JSON object"):
        require_servable(checkpoint)


def test_where_the_figures_cannot_be_written_nothing_is_measured(
    tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "missing" / "figures.json"
    assert evaluate.run(BASE, Split(tmp_path, "held_out"), 1, out, 0) == 1
    assert f"there is no folder {out.parent}" in capsys.readouterr().err.replace("\n", " ").replace("  ", " ")
    assert not list(scratch.iterdir())
