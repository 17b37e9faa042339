"""`etude import` of a GGUF file: the checkpoint of a chat model, or a refusal in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from etude import exchange
from etude.cli import _front_door, app
from etude.exchange import NotExchanged
from shared.model import published_tensors
from shared.objects.directory import DirectoryObjects
from tests.unit.model.test_gguf import made, trained, write


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Small-Chat.F32.gguf"
    vocabulary = trained()
    write(path, "llama", made("llama", vocabulary), vocabulary)
    return path


def test_a_chat_model_comes_in_with_its_format_and_a_name(file: Path, tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path / "objects")
    done = exchange.import_checkpoint(objects, file)
    assert (done.name, done.new, done.notes) == ("Small-Chat.F32", True, ())
    assert not exchange.import_checkpoint(objects, file).new  # the same file is the same checkpoint
    out = exchange.export_stored(objects, "Small-Chat.F32", tmp_path / "out")
    card = json.loads((out / "etude.json").read_text())
    assert (card["format"], card["context"]) == ("chatml", 128)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2]
    model = made("llama", trained())
    found = load_file(out / "model.safetensors")
    for name, tensor in published_tensors(model).items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name
    assert done.parameters == sum(tensor.numel() for tensor in found.values())


def test_a_directory_is_the_same_checkpoint_as_the_file_that_it_came_from(file: Path, tmp_path: Path) -> None:
    exchange.import_to(file, tmp_path / "first")
    exchange.import_to(tmp_path / "first", tmp_path / "second")
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


def test_what_is_no_model_here_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    vocabulary = trained()
    write(tmp_path / "other.gguf", "llama", made("llama", vocabulary), vocabulary, architecture="gemma3")
    with pytest.raises(NotExchanged, match=r"other\.gguf: GGUF of architecture 'gemma3'.*; allowed: llama, qwen2"):
        exchange.import_to(tmp_path / "other.gguf", tmp_path / "out")
    with pytest.raises(NotExchanged, match=r"none\.gguf: cannot be read \(No such file"):
        exchange.import_to(tmp_path / "none.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


def test_on_the_command_line_a_directory_is_written_or_one_line_says_why_not(file: Path, tmp_path: Path) -> None:
    if "import" not in {command.name for command in app.registered_commands}:
        _front_door()
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["import", str(file), "--out", str(out)])
    assert (done.exit_code, f"{out}: " in done.output, (out / "model.safetensors").is_file()) == (0, True, True)
    done = CliRunner().invoke(app, ["import", str(file), "--out", str(out)])
    assert (done.exit_code, "there is something already" in done.output) == (1, True)
