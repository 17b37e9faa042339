from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from sqlalchemy import Engine

from tests.unit.scheduler.ledgers import KINDS, opened


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The tests refuse messages on purpose; their tracebacks would only hide a real one."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    yield
    structlog.configure(**before)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A real ledger on SQLite."""
    with opened("sqlite", tmp_path) as engine:
        yield engine


@pytest.fixture(params=KINDS)
def any_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A real ledger on SQLite, and one on PostgreSQL where there is one."""
    with opened(request.param, tmp_path) as engine:
        yield engine
