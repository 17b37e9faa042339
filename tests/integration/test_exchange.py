"""Policies go out to Hugging Face directories and come in from them, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from etude import exchange
from etude.cli import _front_door, app
from etude.demo import DemoOptions, prepare
from etude.demo.prepare import DemoError
from etude.exchange import NotExchanged
from services.trainer.base.tokenizer import train
from shared import weights
from shared.contracts.ids import REPORT, evaluation_prefix
from shared.contracts.run import Ref, RunConfig
from shared.model import ModelConfig, Transformer, causal_rows, load_checkpoint, published_tensors, save_checkpoint
from shared.objects.directory import DirectoryObjects
from shared.renderers.registry import load_renderer
from shared.weights.checkpoint_objects import upload_directory
from shared.weights.directory import write_tensors
from shared.weights.torch_tensors import to_bits
from tests.end_to_end.problems import write

RUN = "r-20260101T000000-abcd"
REF = Ref(key="k", size=1, checksum="c" * 32)
SHAPE = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "num_nextn_predict_layers": 1, "tie_word_embeddings": True,
    "max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with the compact format."""
    directory = tmp_path_factory.mktemp("made") / "small"
    torch.manual_seed(0)
    save_checkpoint(Transformer(ModelConfig.from_dict(SHAPE)), directory)
    lines = Path(__file__).read_text().splitlines()
    train(lines, directory / "tokenizer.json", vocabulary=512)
    (directory / "etude.json").write_text(json.dumps({"format": "compact-1", "context": 256, "parent": "nobody"}))
    return directory


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    return shutil.copytree(made, tmp_path / "small")


@pytest.fixture
def objects(tmp_path: Path) -> DirectoryObjects:
    return DirectoryObjects(tmp_path / "objects")


def practise(objects: DirectoryObjects, base: Path) -> list[dict[str, torch.Tensor]]:
    """A run with two published versions, the second a delta. Returns their tensors."""
    config = RunConfig(run=RUN, base=upload_directory(objects, f"runs/{RUN}/base", base), pack=REF, pack_hidden=REF)
    objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(config))
    model, before, found = load_checkpoint(base), None, []
    for serial in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * serial * torch.randn_like(parameter)
        tensors = published_tensors(model)
        bits = to_bits(tensors)
        ref = weights.publish(objects, RUN, serial, 0, serial, before, bits)
        before = weights.Version(serial, ref, bits)
        found.append({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
    return found


def logprobs(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    model, length = load_checkpoint(directory), len(tokens)
    with torch.no_grad():
        out = model(tokens, torch.arange(length), causal_rows(1, length))
        return model.logits(out.hidden_ND).log_softmax(-1)


@pytest.mark.parametrize("base", ["small", "ours"])
def test_an_exported_policy_is_loaded_by_transformers_and_says_the_same(
    made: Path, objects: DirectoryObjects, tmp_path: Path, base: str
) -> None:
    start = made if base == "small" else prepare.BASE
    _, newest = practise(objects, start)
    out = tmp_path / "out"
    done = exchange.export_run(objects, RUN, out)
    assert (done.serial, done.step, done.tensors) == (1, 1, len(newest))
    written = load_file(out / "model.safetensors")
    assert written.keys() == newest.keys()
    assert all(torch.equal(written[name], newest[name]) for name in newest)

    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    layers = theirs.config.num_hidden_layers
    assert all(name.startswith(f"model.layers.{layers}.") for name in info["unexpected_keys"])  # MTP
    tokenizer, chat = transformers.AutoTokenizer.from_pretrained(out), load_renderer(out)
    text = "def f(a):\n    return a + 1\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == chat.encode(text)  # type: ignore[attr-defined]
    assert tokenizer.pad_token_id == chat.pad  # type: ignore[attr-defined]
    assert theirs.generation_config.eos_token_id == list(chat.stop_tokens)
    tokens = torch.tensor(ids)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0].log_softmax(-1)
    difference = (logprobs(out, tokens) - expected).abs().max()
    assert difference <= 1e-4, f"largest difference of a log-probability: {difference:.2e}"
    card = json.loads((out / "etude.json").read_text())
    assert (card["parent"], card["step"], card["context"]) == (f"{RUN}@1", 1, chat.context)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_any_published_version_can_be_had(made: Path, objects: DirectoryObjects, tmp_path: Path) -> None:
    first, _ = practise(objects, made)
    exchange.export_run(objects, RUN, tmp_path / "out", 0)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], first[name]) for name in first)
    with pytest.raises(NotExchanged, match=r"version 2 is not in the store; published: 0 to 1"):
        exchange.export_run(objects, RUN, tmp_path / "other", 2)
    assert not (tmp_path / "other").exists()


def test_large_weights_go_into_shards_that_are_read_back_as_one(made: Path, checkpoint: Path) -> None:
    whole = load_file(made / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    written = write_tensors(to_bits(whole), checkpoint, shard_bytes=20_000)
    assert len(written) > 3
    again = published_tensors(load_checkpoint(checkpoint, torch.bfloat16))
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_what_transformers_saved_comes_in_and_a_run_starts_from_it(
    made: Path, objects: DirectoryObjects, tmp_path: Path
) -> None:
    practise(objects, made)
    exchange.export_run(objects, RUN, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(
        NotExchanged, match=rf"^{tmp_path}/theirs: it has no etude\.json.*: found no chat template; allowed"
    ):
        exchange.import_checkpoint(objects, tmp_path / "theirs")
    done = exchange.import_checkpoint(objects, tmp_path / "theirs", name="mine", chat="compact-1", context=200)
    assert done.new
    assert "no MTP tensors" in done.notes[0]
    assert not exchange.import_checkpoint(objects, tmp_path / "theirs", name="mine", chat="compact-1", context=200).new

    write(tmp_path / "mine.jsonl")
    options = DemoOptions(problems=tmp_path / "mine.jsonl", state=tmp_path, base="mine", uniform_sampling=True)
    config, _ = prepare.new_run(objects, options)
    assert config.base == done.ref == exchange.stored(objects, "checkpoints/mine")
    directory = tmp_path / "checkpoints" / config.base.checksum
    assert load_renderer(directory).context == 200
    tokens = torch.arange(40)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0].log_softmax(-1)
    assert (logprobs(directory, tokens) - expected).abs().max() <= 1e-4
    with pytest.raises(DemoError, match="there are: mine"):
        prepare.new_run(objects, replace(options, base="other"))


def test_named_chat_templates_come_in_and_go_out_with_their_checkpoint(
    checkpoint: Path, objects: DirectoryObjects, tmp_path: Path
) -> None:
    name = "additional_chat_templates/tool_use.jinja"
    (checkpoint / name).parent.mkdir()
    (checkpoint / name).write_text("{{ tools }}")
    assert exchange.import_checkpoint(objects, checkpoint, name="mine").new
    assert not exchange.import_checkpoint(objects, checkpoint, name="mine").new
    exchange.import_to(checkpoint, tmp_path / "imported")
    exchange.export_stored(objects, "checkpoints/mine", tmp_path / "stored")
    exchange.export_directory(checkpoint, tmp_path / "directory")
    practise(objects, checkpoint)
    exchange.export_run(objects, RUN, tmp_path / "run")
    for out in ("imported", "stored", "directory", "run"):
        assert (tmp_path / out / name).read_text() == "{{ tools }}", out
    (checkpoint / name).write_text("another")
    with pytest.raises(NotExchanged, match="another checkpoint"):
        exchange.import_checkpoint(objects, checkpoint, name="mine")


def edited(**fields: Any) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **fields}))

    return spoil


def retensored(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return spoil


def truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


HEAD, EMBEDDING, COPIES = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    ("embed_tokens.weight", "shared_head.head.weight"),
)
NORM, GATE = "model.norm.weight", "model.layers.0.mlp.gate.weight"
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "another architecture": (edited(model_type="mistral"), r"model_type 'mistral'; allowed: deepseek_v3, kimi_k2, llama"),
    "a bias": (edited(attention_bias=True), r"attention_bias is True; supported: False"),
    "quantised": (edited(quantization_config={"bits": 4}), r"quantization_config"),
    "more layers": (edited(num_hidden_layers=4), r"tensors are missing, the first is"),
    "wider": (edited(hidden_size=64), r"another shape than config.json asks for, the first is .*: \(.*\), asked for \("),
    "impossible": (edited(num_experts_per_tok=9), r"num_experts_per_tok is 9; allowed: 1..4"),
    "no size": (edited(hidden_size=-4), r"hidden_size is -4; allowed: a whole number, 1 to"),
    "too large a size": (edited(hidden_size=2**31 - 1, vocab_size=2**31 - 1), r"config.json describes no model|shape"),
    "a number as text": (edited(num_hidden_layers="2"), r"num_hidden_layers is '2'; allowed: a whole number"),
    "a missing tensor": (retensored(lambda t: t.pop(GATE)), rf"1 tensors are missing, the first is '{GATE}'"),
    "another shape": (retensored(lambda t: t.update({NORM: torch.ones(7)})), rf"'{NORM}': \(7,\), asked for \(32,\)"),
    "another dtype": (retensored(lambda t: t.update({NORM: t[NORM].double()})), rf"'{NORM}': F64; allowed: BF16, F16, F32"),
    "an adapter": (retensored(lambda t: t.update({"lora_A": torch.ones(1)})), r"does not have, the first is 'lora_A'"),
    "a head that is not tied": (
        retensored(lambda t: t.update({HEAD: t[EMBEDDING] * 2})),
        rf"'{HEAD}' differs from '{EMBEDDING}', .*tie_word_embeddings: false",
    ),
    "an MTP layer of other words": (
        retensored(lambda t: t.update({f"model.layers.2.{COPIES[0]}": t[EMBEDDING] * 2})),
        rf"'model.layers.2.{COPIES[0]}' differs from '{EMBEDDING}', .*allowed: the same numbers$",
    ),
    "other names": (
        retensored(lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)]),
        r"tensors are missing, .*; found instead: \d+, the first is 'embed_tokens.weight'",
    ),
    "a pointer of Git LFS": (
        lambda d: (d / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        r"not a readable safetensors file \(found a pointer of Git LFS; `git lfs pull`",
    ),
    "not finite": (retensored(lambda t: t[NORM].fill_(float("nan"))), rf"not finite in bf16, the first is '{NORM}'"),
    "half a file": (truncated, r"not a readable safetensors file"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"found neither model.safetensors nor"),
    "no configuration": (lambda d: (d / "config.json").unlink(), r"no config.json"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), r"no tokenizer"),
    "another's tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), r"tokenizer.json: no tokenizer can be read"),
    "a list of formats": (
        lambda d: (d / "etude.json").write_text('{"format": ["x"]}'),
        r"format: found \['x'\]; allowed: .*compact-1",
    ),
    "a card that is a folder": (
        lambda d: (d / "etude.json").unlink() or (d / "etude.json").mkdir(),
        r"etude.json: cannot be read \(Is a directory",
    ),
    "an unknown format": (
        lambda d: (d / "etude.json").write_text('{"format": "x"}'),
        r"chat format 'x': not known; allowed: .*compact-1",
    ),
    "a card that is none": (lambda d: (d / "etude.json").write_text("[]"), r"found list; allowed: a JSON object"),
    "a long context": (lambda d: (d / "etude.json").write_text('{"format": "compact-1", "context": 999}'), r"found 999"),
    "no context": (lambda d: (d / "etude.json").write_text('{"format": "compact-1", "context": 0}'), r"found 0; allowed: 33"),
    "less than no context": (lambda d: (d / "etude.json").write_text('{"format": "compact-1", "context": -5}'), r"found -5"),
    "a configuration that is none": (lambda d: (d / "config.json").write_text("[]"), r"found list; allowed: a JSON object"),
    "a configuration of no text": (lambda d: (d / "config.json").write_bytes(b"\xff"), r"not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
def test_what_a_run_could_not_start_from_is_refused_by_name_and_nothing_is_stored(
    checkpoint: Path, objects: DirectoryObjects, what: str
) -> None:
    spoil, says = SPOILT[what]
    spoil(checkpoint)
    with pytest.raises(NotExchanged, match=says):
        exchange.import_checkpoint(objects, checkpoint)
    assert list(objects.list("checkpoints/")) == []


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
def test_a_directory_whose_tokenizer_cannot_be_read_is_not_exported(
    checkpoint: Path, tmp_path: Path, text: str | None
) -> None:
    (checkpoint / "tokenizer.json").unlink()
    if text is not None:
        (checkpoint / "tokenizer.json").write_text(text)
    with pytest.raises(NotExchanged, match=r"no tokenizer"):
        exchange.export_directory(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_taken_is_refused_before_any_weights_are_read(
    checkpoint: Path, objects: DirectoryObjects, tmp_path: Path
) -> None:
    practise(objects, checkpoint)
    for key in [key for key in objects.list(f"runs/{RUN}/policies/") if not key.endswith("manifest.json")]:
        objects.delete(key)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(NotExchanged, match="there is something already"):
        exchange.export_run(objects, RUN, checkpoint)
    with pytest.raises(NotExchanged, match="there is something already"):
        exchange.export_directory(checkpoint, checkpoint)
    with pytest.raises(NotExchanged, match=f"run {RUN}, version 1"):
        exchange.export_run(objects, RUN, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_card_that_names_no_context_gets_as_many_tokens_as_there_are_positions(
    checkpoint: Path, objects: DirectoryObjects, tmp_path: Path
) -> None:
    (checkpoint / "etude.json").write_text('{"format": "compact-1", "context": null}')
    exchange.import_checkpoint(objects, checkpoint, name="mine")
    out = exchange.export_stored(objects, "mine", tmp_path / "out")
    assert load_renderer(out).context == 256


def test_copies_of_the_embedding_are_taken_for_what_they_are(
    checkpoint: Path, objects: DirectoryObjects, tmp_path: Path
) -> None:
    first = exchange.import_checkpoint(objects, checkpoint, name="without")
    names = (HEAD, *(f"model.layers.2.{name}" for name in COPIES))
    retensored(lambda t: t.update({name: t[EMBEDDING].clone() for name in names}))(checkpoint)
    assert exchange.import_checkpoint(objects, checkpoint, name="with").parameters == first.parameters
    out = exchange.export_stored(objects, "with", tmp_path / "out")
    assert not load_file(out / "model.safetensors").keys() & set(names)


def test_a_vocabulary_larger_than_the_embedding_is_refused(
    made: Path, objects: DirectoryObjects, tmp_path: Path
) -> None:
    narrow = tmp_path / "narrow"
    save_checkpoint(Transformer(ModelConfig.from_dict({**SHAPE, "vocab_size": 300})), narrow)
    for name in ("tokenizer.json", "etude.json"):
        shutil.copyfile(made / name, narrow / name)
    with pytest.raises(NotExchanged, match=r"has \d+ tokens; config.json has room for 300"):
        exchange.import_checkpoint(objects, narrow)


def test_a_name_is_never_given_to_other_weights(checkpoint: Path, objects: DirectoryObjects) -> None:
    exchange.import_checkpoint(objects, checkpoint, name="mine")
    retensored(lambda tensors: tensors[NORM].add_(1))(checkpoint)
    with pytest.raises(NotExchanged, match="holds another checkpoint"):
        exchange.import_checkpoint(objects, checkpoint, name="mine")
    for name in ("../escape", "a/b", "", ".hidden", "x" * 90):
        with pytest.raises(NotExchanged, match="--name"):
            exchange.import_checkpoint(objects, checkpoint, name=name or "é")


def test_on_the_command_line_errors_are_one_text_and_a_code(checkpoint: Path, tmp_path: Path) -> None:
    if "export" not in {command.name for command in app.registered_commands}:
        _front_door()
    environment = {"ETUDE_STATE": str(tmp_path), "ETUDE_OBJECTS": "", "ETUDE_CONFIG": ""}

    def etude(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(arguments), env=environment)
        return done.exit_code, done.output

    objects = DirectoryObjects(tmp_path / "objects")
    practise(objects, checkpoint)
    out = tmp_path / "out"
    code, said = etude("export", RUN, "--out", str(out))
    assert (code, f"{out}: version 1 (step 1) of {RUN}, 69 tensors" in said) == (0, True)
    code, said = etude("export", f"{RUN}@0", "--out", str(out))
    assert (code, "there is something already" in said) == (1, True)
    assert etude("export", f"{RUN}@0", "--out", str(tmp_path / "zero"))[0] == 0
    assert etude("import", str(checkpoint), "--name", "other")[0] == 0
    for other in ("checkpoints/other", str(checkpoint)):
        code, said = etude("export", other, "--version", "1", "--out", str(tmp_path / "none"))
        assert (code, f"--version 1: {other} is no run" in said) == (1, True)
    code, said = etude("export", "other", "--out", str(tmp_path / "none"))
    assert (code, "`checkpoints/other` is one" in said) == (1, True)
    code, said = etude("export", "r-none", "--out", str(tmp_path / "none"))
    assert (code, "neither a directory" in said) == (1, True)
    code, said = etude("export", f"{RUN}@x", "--out", str(tmp_path / "none"))
    assert (code, "found 'x'; allowed: a number, or best" in said) == (1, True)
    code, said = etude("export", f"{RUN}@best", "--out", str(tmp_path / "none"))
    assert (code, "found measured nothing" in said) == (1, True)
    assert not (tmp_path / "none").exists()
    for serial, solved in enumerate((2, 1)):
        figures = {"pass_at_1": solved / 2, "pass_at_1_low": 0.0, "pass_at_1_high": 1.0, "samples": 2.0, "problems": 1.0,
                   "k": 2.0, "best_of_k": 1.0, "first_edit": 0.0, "attempts": 2.0, "infrastructure_errors": 0.0}  # fmt: skip
        report = {"serial": serial, "figures": figures, "problems": {"p": {"samples": 2, "solved": solved}}}
        objects.put(f"{evaluation_prefix(RUN, f'e{serial}')}/{REPORT}", json.dumps(report).encode())
    code, said = etude("export", RUN, "--version", "best", "--out", str(tmp_path / "best"))
    assert (code, "version 0 (step 0)" in said, "is the best of 2 that were measured so" in said) == (0, True, True)
    code, said = etude("import", str(out), "--name", "mine")
    assert (code, "etude start --base mine" in said) == (0, True)
    assert etude("export", "checkpoints/mine", "--out", str(tmp_path / "again"))[0] == 0
    assert etude("export", str(checkpoint), "--out", str(tmp_path / "local"))[0] == 0
    for name in ("again", "out"):
        assert (tmp_path / name / "model.safetensors").read_bytes()
    code, said = etude("import", str(tmp_path / "nowhere"))
    assert (code, "no config.json" in said) == (1, True)
