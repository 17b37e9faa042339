"""One thread: bit-equality is promised for the same number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.objects import Objects, connect


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return connect(f"file:{tmp_path / 'objects'}")
