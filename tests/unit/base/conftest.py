from pathlib import Path

import pytest
from miniature import FUNCTIONS, make_problems, own_functions, write_lines

from services.trainer.base.tokenizer import train
from shared.problems import FunctionHidden, FunctionProblem
from shared.renderers.formats.compact_1 import Compact


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pack")
    write_lines(directory / "pretrain.jsonl.zst", [{"source": s, "origin": "etude"} for s in own_functions()])
    for split, functions in FUNCTIONS.items():
        pairs = make_problems(functions)
        write_lines(directory / f"{split}.public.jsonl.zst", [p for p, _ in pairs])
        write_lines(directory / f"{split}.hidden.jsonl.zst", [h for _, h in pairs])
    return directory


@pytest.fixture(scope="session")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Compact:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train([line.strip() for s in own_functions() for line in s.split("\n")], path, vocabulary=1024)
    return Compact(path)


@pytest.fixture(scope="session")
def train_pairs() -> list[tuple[FunctionProblem, FunctionHidden]]:
    return make_problems(FUNCTIONS["train"])
