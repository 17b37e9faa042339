"""compact-1 as the stand-in writes it: token ids alone, without the project's own writer and reader.

A copy on purpose: the guard must not change with the code that it guards. The format is described in
shared/renderers/formats/compact_1.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

CONTROL = (
    "pad", "task", "tests", "t", "got", "edit", "undo", "test", "submit", "sum", "done", "obs", "pass", "broken", "cut",
    "end", "eos",
)  # fmt: skip
SPECIAL = [*CONTROL, *(f"i{i}" for i in range(1, 9)), *(f"T{i}" for i in range(1, 9)), *(f"L{i}" for i in range(1, 49))]
EXPERTS, TOP_K, LAYERS = 4, 2, 2


def plain_tokenizer() -> Tokenizer:
    """Special tokens and one token per byte. No training, so it is the same wherever and whenever it is made."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [f"<{name}>" for name in SPECIAL]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate([*names, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s|\w+|[^\s\w]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(names)
    return made


def write_checkpoint(directory: Path, tokenizer: Path | None, context: int, *, moe: bool) -> None:
    """What a rollout worker reads of a checkpoint. `tokenizer` None: the plain one. `moe`: replies carry routed experts."""
    directory.mkdir(parents=True)
    if tokenizer is None:
        plain_tokenizer().save(str(directory / "tokenizer.json"))
    else:
        shutil.copyfile(tokenizer, directory / "tokenizer.json")
    (directory / "etude.json").write_text(json.dumps({"format": "compact-1", "context": context}))
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K} if moe else {}
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS, **experts}))
    (directory / "model.safetensors").write_bytes(b"no rollout worker reads weights")


class Writer:
    """Writes calls in a checkpoint's tokens. `ids["test"]` is the id of `<test>`."""

    def __init__(self, tokenizer: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.tokenizer.encode_special_tokens = True
        self.ids = {name: i for i, name in enumerate(SPECIAL)}
        self.stops = {self.ids[name] for name in ("test", "submit", "done")}
        self.size = self.tokenizer.get_vocab_size()
        # A byte that begins a longer UTF-8 sequence: alone it is no text.
        self.not_utf8 = self.tokenizer.token_to_id(
            pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("é")[0][0][0]
        )

    def text(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def edit(self, line: int, old: str, new: str) -> list[int]:
        """`<edit> <L> OLD <got> NEW <end>`; `line` counts from zero, up to 47."""
        ids = self.ids
        return [ids["edit"], ids[f"L{line + 1}"], *self.text(old), ids["got"], *self.text(new), ids["end"]]

    def change(self, line: int, before: str, after: str) -> list[int]:
        """The edit that makes `after` of a line's text `before`: the differing part, with as much before it as it needs."""
        head = next(
            (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
        )
        tail = 0
        while tail < min(len(before), len(after)) - head and before[-1 - tail] == after[-1 - tail]:
            tail += 1
        for start in range(head, -1, -1):
            old, new = before[start : len(before) - tail], after[start : len(after) - tail]
            if old and before.replace(old, new, 1) == after:
                return self.edit(line, old, new)
        return self.edit(line, before, after)
