"""`etude eval`: a checkpoint that cannot be measured is refused at once, and what failed leaves its logs."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from etude import evaluate, status
from etude.demo.prepare import BASE, DemoError
from etude.evaluate import Split, require_servable, temporary_state
from etude.exchange import NotExchanged

NORM = "model.layers.2.input_layernorm.weight"
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


def spoil(checkpoint: Path, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, NORM: how(tensors[NORM])}, path, metadata={"format": "pt"})


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


def test_a_folder_without_a_checkpoint_is_named_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.run(tmp_path / "ck[/bold]", Split(tmp_path, "held_out"), 1, None, 0) == 2
    assert f"--checkpoint {tmp_path}/ck[/bold]: no config.json there; expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("card", "said"),
    [
        (None, r"no etude\.json.*allowed: .*compact-1.*etude import"),
        ({"format": "talk", "context": 512}, r"'talk'; known: .*compact-1"),
        (
            {"format": "chatml", "context": 512},
            r"found no added token <\|im_start\|>; allowed: a tokenizer that has it",
        ),
        ({"format": "compact-1"}, r"etude\.json has no 'context'"),
        ({"format": "compact-1", "context": None}, r"etude\.json has no 'context'; allowed: a whole number from 33"),
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


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_a_checkpoint_whose_tokenizer_cannot_be_read_is_refused_without_a_way_that_leads_nowhere(
    checkpoint: Path, text: str | None
) -> None:
    (checkpoint / "tokenizer.json").unlink()
    if text is not None:
        (checkpoint / "tokenizer.json").write_text(text)
    with pytest.raises(DemoError, match=r"its chat format cannot be read: .*tokenizer\.json") as refused:
        require_servable(checkpoint)
    assert "etude import" not in str(refused.value)


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


@pytest.mark.parametrize("context", [-5, 0, 20, 32, 100_000, True, "512", 512.0])
def test_a_context_that_the_model_does_not_have_is_refused(checkpoint: Path, context: object) -> None:
    card = json.loads((checkpoint / "etude.json").read_text())
    (checkpoint / "etude.json").write_text(json.dumps({**card, "context": context}))
    with pytest.raises(
        NotExchanged, match=rf"context: found {context!r}; allowed: 33 to 512 \(max_position_embeddings\)"
    ):
        require_servable(checkpoint)


@pytest.mark.parametrize(
    ("dtype", "spelt"), [(torch.float64, "F64"), (torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_a_tensor_of_a_dtype_that_no_engine_reads_is_refused(checkpoint: Path, dtype: torch.dtype, spelt: str) -> None:
    spoil(checkpoint, lambda norm: norm.to(dtype))
    with pytest.raises(NotExchanged, match=rf"1 tensors .* the first is '{NORM}': {spelt}; allowed: BF16, F16, F32"):
        require_servable(checkpoint)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_refused_with_its_tensor(checkpoint: Path, number: float) -> None:
    spoil(checkpoint, lambda norm: norm.index_fill(0, torch.tensor([3]), number))
    with pytest.raises(NotExchanged, match=f"1 tensors are not finite in bf16, the first is '{NORM}'"):
        require_servable(checkpoint)


@pytest.mark.parametrize("eps", [None, "1e-6", 0, -1e-6, float("nan")])
def test_a_norm_without_a_small_number_above_0_is_refused(checkpoint: Path, eps: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "rms_norm_eps": eps}))
    with pytest.raises(NotExchanged, match=f"rms_norm_eps is {eps!r}; allowed: a number above 0"):
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
