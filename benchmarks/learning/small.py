"""A small model of the `llama` family that speaks ChatML, made from nothing by the base recipe (Muon, by the clock).

It is pretrained on generated repositories of the training split: their code, and scripted traces read as text. So, unlike
SmolLM2, it has seen the format before SFT begins.
"""

from __future__ import annotations

import csv
import inspect
import json
import random
import shlex
import statistics
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.learning.repositories import Task, generate
from benchmarks.learning.scripted import trace, turns, written
from services.trainer.base.samples import Sample, Samples, Weight
from services.trainer.base.settings import Phase
from services.trainer.base.train import Progress, Report, Trainer, by_the_clock
from shared.environments.repository import SYSTEM
from shared.environments.tools import lines_of, load, numbered
from shared.model import ModelConfig, Transformer, load_checkpoint, save_checkpoint
from shared.renderers.calls.hermes import CLOSE, OPEN, Hermes
from shared.renderers.formats.chatml import BEGIN, END, ChatML, in_words
from shared.sandbox.contract import WORKSPACE

VOCABULARY = 1024  # the generator's words are invented; more would be rare pieces of them, each hardly trained
CONTEXT = 1024
CARD = {"format": "chatml", "calls": "hermes", "tools": "short", "context": CONTEXT}
# 5.0M parameters, with sizes in whole vectors, as the kernels of the engine like them.
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
# The rate falls to a tenth: SFT begins with an optimiser of its own.
PRETRAIN = Phase("pretrain", share=1.0, start=1.0, end=0.1, context_weight=0.2)
# Words of the tokenizer. A line's number with its indentation is one, and so is each piece of a call's JSON: a trace has half
# the tokens, and code is cut alike in a listing and in a call, which makes it easy to copy.
WORDS = (
    r"\n? {3,6}\d+\t *",
    r'\{"name": "',
    r'", "arguments": \{',
    r'(?:", )?"(?:path|pattern|old|new)": "',
    r'"?\}\}',
    r'"""|</?tool_response>',
    r" ?_?[A-Za-z]+",
    r" ?\d",
    r"\n *",
    r" ?[^\sA-Za-z0-9]",
    r"\s",
)
TEXTS = 400  # problems that the tokenizer is trained on
DATA_SEED = 900


class SittingOver(Exception):
    """The time of this sitting is over; its state is in the run's folder."""


def create(
    directory: Path, seed: int = 0, model: dict[str, Any] = MODEL, vocabulary: int = VOCABULARY, texts: int = TEXTS
) -> None:
    """Write a checkpoint of random weights with its tokenizer and card; leave one that is there."""
    if (directory / "etude.json").is_file():
        return
    directory.mkdir(parents=True, exist_ok=True)
    size = _tokenizer(directory, generate("train", texts, DATA_SEED), vocabulary)
    torch.manual_seed(seed)
    shape = {**model, "vocab_size": size}
    save_checkpoint(Transformer(ModelConfig.from_dict(shape)), directory, torch.float32)
    (directory / "etude.json").write_text(json.dumps(CARD, indent=2) + "\n")


def _tokenizer(directory: Path, tasks: list[Task], vocabulary: int) -> int:
    """Train a byte-level BPE on the text of problems and traces; return the size that the model needs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(WORDS)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = (BEGIN, END, OPEN, CLOSE)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(control),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(tasks), trainer)
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in (OPEN, CLOSE)])
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(END)]}))
    return max(vocabulary, -(-tokenizer.get_vocab_size() // 64) * 64)


def _texts(tasks: list[Task]) -> Iterator[str]:
    """What a trace holds, and some Python code for what the generator does not write."""
    head = [
        SYSTEM.format(folder=WORKSPACE),
        Hermes.form,
        *(in_words(load(name).spec) for name in tasks[0].problem.tools),
    ]
    for task in tasks:
        yield "\n".join(head)
        yield f"user\n{task.problem.prompt}"
        yield from task.files.values()
        yield f"\n<tool_response>\n{numbered(lines_of(task.files[task.path]), 1)}\n</tool_response>"
        yield from (f"assistant\n{written(*call)}" for call in turns(task))
    for module in (csv, shlex, statistics, textwrap):
        yield inspect.getsource(module)


def data(renderer: ChatML, count: int, seed: int) -> Samples:
    """Return traces, read whole, and one module for each other trace."""
    rng, samples = random.Random(seed), []
    for number, task in enumerate(generate("train", count, seed)):
        segment = trace(task, renderer)
        weights = [int(Weight.action if sampled else Weight.context) for sampled in segment.loss_mask]
        samples.append(Sample(segment.tokens.tolist(), weights))
        if number % 2:
            ids = renderer.vocabulary.plain(
                rng.choice([text for path, text in task.files.items() if path.endswith(".py")])
            )
            samples.append(Sample.of((ids, Weight.context)))
    return Samples.of(samples)


def pretrain(
    start: Path, out: Path, work: Path, minutes: float, count: int, over: Callable[[], bool], seed: int = 0
) -> list[dict[str, Any]]:
    """Pretrain on `count` traces for so many minutes of computing, resuming from `work`; write the checkpoint
    `out`. Return its reports. Raises SittingOver once `over` says so."""
    renderer = ChatML.load(start)
    work.mkdir(exist_ok=True)
    cached = work / "data.npz"
    if not cached.is_file():
        data(renderer, count, DATA_SEED + 1).save(cached)
    samples = Samples.load(cached)
    model = load_checkpoint(start)
    log = work / "pretrain.jsonl"

    def report(line: Report) -> None:
        with log.open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        print(f"pretrain: step {line.step}, {line.tokens:,} tokens, {line.minutes:.1f} min, loss {line.train:.3f}, "
              f"action {line.action:.3f}, exact {line.exact:.3f}, {line.tokens_per_s:.0f} tokens/s", flush=True)  # fmt: skip

    clock = by_the_clock(minutes)

    def budget(progress: Progress) -> float:
        if over():
            raise SittingOver
        return clock(progress)

    validation = data(renderer, 24, DATA_SEED + 2)
    trainer = Trainer(model, PRETRAIN, budget, samples, validation, work, report, seed)
    try:
        trainer.run()
    except SittingOver:
        trainer.save(work)
        raise
    copy_speech(start, out)
    save_checkpoint(model, out, torch.float32)
    return [json.loads(line) for line in log.read_text().splitlines()]


def copy_speech(source: Path, target: Path, **card: Any) -> None:
    """Copy what makes a checkpoint speak, with other fields of the card."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    content = {**json.loads((source / "etude.json").read_text()), **card}
    (target / "etude.json").write_text(json.dumps(content, indent=2) + "\n")
