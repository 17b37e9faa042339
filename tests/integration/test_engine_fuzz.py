"""schemathesis against a replica's own OpenAPI document: whatever is sent, no answer is a 5xx that nobody meant."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from services.inference.openapi import OPERATIONS, document
from tests import fuzz
from tests.integration.engine_platform import Platform, run, start_process
from tests.patience import patient

schemathesis = fuzz.library()
pytestmark = pytest.mark.slow
ANSWER_S = 20.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A replica that serves."""
    state: Path = tmp_path_factory.mktemp("fuzz")
    platforms: list[Platform] = []

    async def begin(platform: Platform) -> None:
        platform.write_version(0, None)
        await platform.start_run()
        platforms.append(platform)

    run(begin, state)
    process, address = start_process(platforms[0])
    try:
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(patient(60))


def test_the_document_is_served(url: str) -> None:
    assert requests.get(f"{url}/openapi.json", timeout=patient(ANSWER_S)).json() == document()


@pytest.mark.parametrize("path", list(OPERATIONS))
def test_nothing_that_is_sent_breaks_a_replica(url: str, path: str) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    def ask(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, timeout=patient(ANSWER_S))
        if path == "/pause_generation":  # or the next generation waits for ever, as it should
            requests.post(f"{url}/continue_generation", timeout=patient(ANSWER_S))
        checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
        case.validate_response(answer, checks=checks)

    fuzz.explore(document(), path, OPERATIONS[path][0], ask)
    assert requests.get(f"{url}/health", timeout=patient(ANSWER_S)).json() == {"alive": True, "serving": True}
