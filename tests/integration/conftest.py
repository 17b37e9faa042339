"""For the tests beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.servers import only_what_is_here


@pytest.fixture(scope="module", autouse=True)  # not session: a worker runs other folders afterwards
def _nothing_is_fetched() -> Iterator[None]:
    """A program that is not here is an error, which names the step that fetches it; no test waits for a mirror."""
    with only_what_is_here():
        yield
