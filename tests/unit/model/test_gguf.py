"""A GGUF file becomes the checkpoint that it was made of, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.model import ModelConfig, Transformer, load_checkpoint, published_tensors
from shared.model.attention import inverse_frequencies
from shared.model.fields import UnknownModel
from shared.model.gguf_file import convert
from shared.model.gguf_tokenizer import tokenizer_of

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e4,
    "initializer_range": 0.2,
}
MOE = {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
# family -> (config.json, llama.cpp's name)
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({**COMMON, "tie_word_embeddings": True}, "llama"),
    "qwen2": (COMMON, "qwen2"),
    "qwen3": ({**COMMON, "head_dim": 32}, "qwen3"),
    "qwen3_moe": (MOE, "qwen3moe"),
}
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (  # SmolLM2's
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
    "helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] "
    "+ '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "def f(x):\n    return x + 12345\n\n\tclass A: pass",
    "The quick brown fox's dog don't jump over 007 lazy  spaces   and\r\nlines.",
    "naïve façade — übergrößenträger, 你好世界 こんにちは مرحبا 안녕",
    "import os, sys\nfor i in range(10):\n    print(f'{i:>8}', i ** 2)\n" * 3,
]


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, Any]:
    return trained()


def trained() -> dict[str, Any]:
    """A byte-level BPE of our own, as llama.cpp's metadata hold one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=list(ENDS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    return {
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "types": [3 if token in ENDS else 1 for token in tokens],
    }


def made(family: str, vocabulary: dict[str, Any]) -> Transformer:
    torch.manual_seed(0)
    raw = {**FAMILIES[family][0], "model_type": family, "vocab_size": len(vocabulary["tokens"])}
    model = Transformer(ModelConfig.from_dict(raw)).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
    return model


def in_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter lays out q and k of a Llama."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
Q = gguf.GGMLQuantizationType


def write(
    path: Path, family: str, model: Transformer, vocabulary: dict[str, Any], kind: Any = Q.F32, **more: Any
) -> None:
    """The file that llama.cpp's converter would make: matrices in `kind`, vectors in F32. `more`: metadata that replace or
    add to those (a value of None leaves one out)."""
    c, (_, architecture) = model.config, FAMILIES[family]
    architecture = more.pop("architecture", architecture)
    writer = gguf.GGUFWriter(str(path), architecture)
    numbers = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
    }
    if c.moe:
        numbers |= {
            "expert_count": c.moe.num_experts,
            "expert_used_count": c.moe.num_experts_per_tok,
            "expert_feed_forward_length": c.moe.intermediate_size,
        }
    for name, number in (numbers | more.pop("numbers", {})).items():
        if number is not None:
            writer.add_uint32(f"{architecture}.{name}", number)
    writer.add_float32(f"{architecture}.rope.freq_base", c.rope.theta)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    for name, text in more.pop("texts", {}).items():
        writer.add_string(f"{architecture}.{name}", text)
    writer.add_tokenizer_model(more.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(more.pop("pre", "smollm"))
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(more.pop("eos", 2))
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors_of(family, model).items():
        values = tensor.numpy()
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in more.pop("tensors", {}).items():
        writer.add_tensor(name, values)
    assert not more
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(family: str, model: Transformer) -> dict[str, torch.Tensor]:
    c, found, experts = model.config, {}, {}
    for name, tensor in published_tensors(model).items():
        if family == "llama" and ".q_proj" in name:
            tensor = in_pairs(tensor, c.num_attention_heads)
        if family == "llama" and ".k_proj" in name:
            tensor = in_pairs(tensor, c.num_key_value_heads)
        stem, _, kind = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else ""
        part = stem.removeprefix(f"model.layers.{layer}.") if layer else stem
        if ".experts." in part:
            experts.setdefault((layer, part.split(".")[-1].removesuffix("_proj")), []).append(tensor)
        else:
            found[f"blk.{layer}.{NAMES[part]}.{kind}" if layer else f"{NAMES[part]}.{kind}"] = tensor
    for (layer, part), each in experts.items():
        found[f"blk.{layer}.ffn_{part}_exps.weight"] = torch.stack(each)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_becomes_the_checkpoint_that_it_was_made_of(
    family: str, vocabulary: dict[str, Any], tmp_path: Path
) -> None:
    model = made(family, vocabulary)
    write(tmp_path / "model.gguf", family, model, vocabulary)
    folder = tmp_path / "out"
    folder.mkdir()
    convert(tmp_path / "model.gguf", folder)
    again = load_checkpoint(folder)
    facts = ("head_dim", "qk_norm", "qkv_bias", "tie_word_embeddings", "moe", "moe_layers", "rope", "rms_norm_eps")
    assert {name: getattr(again.config, name) for name in facts} == {n: getattr(model.config, n) for n in facts}
    found = published_tensors(again)
    for name, tensor in published_tensors(model).items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16).float()), name
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    assert theirs.generation_config.eos_token_id == [2]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_are_read_as_transformers_reads_them(kind: str, vocabulary: dict[str, Any], tmp_path: Path) -> None:
    model = made("llama", vocabulary)
    write(tmp_path / "model.gguf", "llama", model, vocabulary, Q[kind])
    folder = tmp_path / "out"
    folder.mkdir()
    convert(tmp_path / "model.gguf", folder)
    found = load_file(folder / "model.safetensors")
    for name, meant in published_tensors(model).items():
        if meant.dim() == 1:
            assert torch.equal(found[name], meant.to(torch.bfloat16))
            continue
        paired = ".q_proj" in name or ".k_proj" in name
        heads = model.config.num_attention_heads if ".q_proj" in name else model.config.num_key_value_heads
        stored = gguf.quants.quantize((in_pairs(meant, heads) if paired else meant).numpy(), Q[kind])
        values = torch.from_numpy(gguf.quants.dequantize(stored, Q[kind]).copy())
        if paired:  # rows (2i, 2i + 1) of a head are its rows (i, i + D/2)
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        assert torch.equal(found[name], values.to(torch.bfloat16)), name
        assert float((found[name].float() - meant).abs().max()) <= 0.15 * float(meant.abs().max())


def test_llama_3s_rotations_are_recognised(vocabulary: dict[str, Any], tmp_path: Path) -> None:
    model = made("llama", vocabulary)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e4,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = ModelConfig.from_dict({**model.config.raw, "rope_parameters": rope, "rope_theta": 5e4})
    plain = 1.0 / 5e4 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / inverse_frequencies(scaled.rope, 16)).numpy().astype(np.float32)
    write(tmp_path / "model.gguf", "llama", model, vocabulary, tensors={"rope_freqs.weight": divisors})
    folder = tmp_path / "out"
    folder.mkdir()
    convert(tmp_path / "model.gguf", folder)
    assert ModelConfig.load(folder).rope == scaled.rope
    odd = divisors.copy()
    odd[3] *= 1.1
    write(tmp_path / "odd.gguf", "llama", model, vocabulary, tensors={"rope_freqs.weight": odd})
    with pytest.raises(UnknownModel, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        convert(tmp_path / "odd.gguf", tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"architecture": "gemma3"},
        r"architecture 'gemma3' \(general\.architecture\); allowed: llama, qwen2, qwen3, qwen3moe",
    ),
    "SentencePiece": ({"tokenizer": "llama"}, r"tokenizer\.ggml\.model is 'llama'; allowed: 'gpt2'"),
    "an unknown way to split text": ({"pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken'; allowed: gpt-2, smollm"),
    "an end beyond the vocabulary": (
        {"eos": 5000},
        r"tokenizer\.ggml\.eos_token_id is 5000; allowed: below \d+ tokens",
    ),
    "a part of a rotation": ({"numbers": {"rope.dimension_count": 8}}, r"rope\.dimension_count is 8; allowed: .* 16"),
    "an unknown rotation": (
        {"texts": {"rope.scaling.type": "longrope"}},
        r"rope\.scaling\.type is 'longrope'; allowed: none, linear, yarn",
    ),
    "no size": ({"numbers": {"embedding_length": None}}, r"metadata 'llama\.embedding_length' is missing"),
    "a layer too few": ({"numbers": {"block_count": 3}}, r"9 tensors are missing, the first is 'model\.layers\.2\."),
    "another size": ({"numbers": {"feed_forward_length": 64}}, r"blk\.0\.ffn_gate\.weight is \(96, 64\)"),
    "a strange tensor": (
        {"tensors": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
        r"tensor 'blk\.0\.attn_sinks\.weight' is none of a llama model",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_cannot_be_read_is_refused_by_name(what: str, vocabulary: dict[str, Any], tmp_path: Path) -> None:
    changed, said = REFUSED[what]
    write(tmp_path / "model.gguf", "llama", made("llama", vocabulary), vocabulary, **changed)
    with pytest.raises(UnknownModel, match=said):
        convert(tmp_path / "model.gguf", tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 99, b"GGUF\3\0\0\0" + b"\xff" * 64])
def test_damaged_files_are_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UnknownModel, match=r"model\.gguf: not a whole GGUF file"):
        convert(tmp_path / "model.gguf", tmp_path)


def test_a_file_cut_short_is_told(vocabulary: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", made("llama", vocabulary), vocabulary)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UnknownModel, match=r"model\.gguf: not a whole GGUF file"):
        convert(path, tmp_path)


# The tokenizer


def metadata(vocabulary: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary["tokens"],
        "tokenizer.ggml.token_type": vocabulary["types"],
        "tokenizer.ggml.merges": vocabulary["merges"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return found | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from([*ENDS, *" \n\t'", "12", "don't", "abc", "é", "你", "x_1"])
).map("".join)


def published_splits() -> dict[str, Any]:
    """The pre-tokenizers of the models' own tokenizer.json, written out as they were published."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    unsplit = {**byte_level, "use_regex": False}

    def by(pattern: str) -> dict[str, Any]:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [split, unsplit]}

    head, tail = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "gpt-2": byte_level,
        "smollm": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "llama-bpe": by(head + r"\p{N}{1,3}" + tail),
        "qwen2": by(head + r"\p{N}" + tail),
    }


@pytest.mark.parametrize("split", published_splits())
def test_text_is_split_as_the_models_own_tokenizers_split_it(split: str, vocabulary: dict[str, Any]) -> None:
    ours = tokenizer_of(metadata(vocabulary, pre=split))
    whole = json.loads(ours.to_str())
    published = Tokenizer.from_str(json.dumps({**whole, "pre_tokenizer": published_splits()[split]}))
    assert whole["model"]["ignore_merges"] == (split == "llama-bpe")
    assert (whole["normalizer"] == {"type": "NFC"}) == (split == "qwen2")

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    def same(text: str) -> None:
        assert ours.encode(text).ids == published.encode(text).ids
        if split != "qwen2":  # which normalises first
            assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text

    same()


@settings(max_examples=200, deadline=None)
@given(text=TEXTS.filter(lambda text: not any(c.isnumeric() for c in text)))
def test_tokens_equal_those_of_transformers(text: str, loaded: tuple[Any, Tokenizer]) -> None:
    """transformers reads the same file and does not look at `tokenizer.ggml.pre`: with numbers it differs from the model's own
    tokenizer, which splits them off first (two spaces before one are a token, not two)."""
    theirs, ours = loaded
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def loaded(vocabulary: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    folder = tmp_path_factory.mktemp("gguf")
    write(folder / "model.gguf", "llama", made("llama", vocabulary), vocabulary)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    return theirs, tokenizer_of(metadata(vocabulary))


def test_the_folder_is_read_by_transformers_with_its_template_and_special_tokens(
    vocabulary: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf", "llama", made("llama", vocabulary), vocabulary)
    folder = tmp_path / "out"
    folder.mkdir()
    convert(tmp_path / "model.gguf", folder)
    read = transformers.AutoTokenizer.from_pretrained(folder)
    assert (read.bos_token, read.eos_token, read.pad_token) == (ENDS[1], ENDS[2], ENDS[0])
    said = read.apply_chat_template([{"role": "user", "content": "hi 12"}], tokenize=False)
    assert said.endswith("<|im_end|>\n<|im_start|>user\nhi 12<|im_end|>\n")
    assert read(said)["input_ids"][0] == 1
    assert sorted(path.name for path in folder.iterdir()) == [
        *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        "tokenizer_config.json",
    ]


def test_a_text_begins_with_bos_where_the_file_says_so(vocabulary: dict[str, Any]) -> None:
    assert tokenizer_of(metadata(vocabulary, add_bos_token=True)).encode("a").ids[0] == 1
    assert tokenizer_of(metadata(vocabulary, add_bos_token=False)).encode("a").ids[0] != 1
