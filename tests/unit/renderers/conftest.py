from pathlib import Path

import pytest

from services.trainer.base.tokenizer import train
from shared.renderers.formats.compact_1 import Compact


@pytest.fixture(scope="session")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Compact:
    """A tokenizer trained on this project's own source."""
    sources = sorted((Path(__file__).parents[3] / "shared").rglob("*.py"))
    lines = [line.strip() for path in sources for line in path.read_text().splitlines()]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train(lines, path, vocabulary=1024)
    return Compact(path)
