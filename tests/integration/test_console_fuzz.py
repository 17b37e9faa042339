"""schemathesis against the console's own OpenAPI document, as nobody and as an operator: no answer is a 5xx."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from services.console.openapi import OPERATIONS, Operation, document
from shared.contracts import messages as m
from shared.contracts import topics as t
from tests import fuzz
from tests.patience import patient
from tests.unit.console.conftest import RUN, World, world
from tests.unit.console.serving import OPERATOR, Console, console

schemathesis = fuzz.library()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
__all__ = ["world"]  # a fixture
ANSWER_S = 30.0
FILE = b'--b\r\nContent-Disposition: form-data; name="reason"; filename="x"\r\n\r\ny\r\n--b--\r\n'


@pytest.fixture(scope="module")
def url(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A console that has read a run, in a thread. The run goes on again after whatever was done to it."""
    ready, place = threading.Event(), dict[str, Any]()

    async def serve() -> None:
        state: Path = tmp_path_factory.mktemp("fuzz")
        async with console(world, state, within_s=None) as there:
            place.update(url=there.url, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            ready.set()
            reviving = asyncio.create_task(revive(there))
            await place["stop"].wait()
            reviving.cancel()

    async def revive(there: Console) -> None:
        while True:
            for run in list(there.board.runs.values()):
                if run.state.value in ("paused", "stopping"):
                    word = m.RunCommand(run=run.run, action="resume")
                    await there.bus.publish(t.RUNS_COMMANDS, run.run, word)
            await asyncio.sleep(0.1)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(patient(60))
    yield place["url"]
    place["loop"].call_soon_threadsafe(place["stop"].set)
    thread.join(30)


def test_the_document_is_served(url: str) -> None:
    assert requests.get(f"{url}/openapi.json", timeout=patient(ANSWER_S)).json() == document()


@pytest.mark.parametrize("who", ["nobody", "operator"])
@pytest.mark.parametrize("one", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
def test_nothing_that_is_sent_breaks_the_console(url: str, one: Operation, who: str) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import status_code_conformance

    headers = {"Authorization": f"Bearer {OPERATOR}"} if who == "operator" else {}
    known = {"run": RUN, "attempt": "a-3", "name": "console.css"}
    asked = 0

    def ask(case: Any) -> None:
        nonlocal asked
        asked += 1
        if asked % 4:  # most of what is sent is sent to something that is there
            case.path_parameters.update({name: known[name] for name in case.path_parameters if name in known})
        answer = case.call(base_url=url, headers=headers, timeout=patient(ANSWER_S), allow_redirects=False)
        case.validate_response(answer, checks=[not_a_server_error, status_code_conformance])

    fuzz.explore(document(), one.path, one.method, ask)
    assert asked >= 1
    assert requests.get(f"{url}/healthz", timeout=patient(ANSWER_S)).status_code == 200


@pytest.mark.parametrize("path", ["/sign-in", "/sign-out", f"/runs/{RUN}/pause", f"/runs/{RUN}/start"])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"--b\r\n"),
        ("multipart/form-data; boundary=b", b"--b\r\nnothing\r\n\r\n--b--\r\n"),
        ("multipart/form-data; boundary=b", FILE),
        ("multipart/form-data; boundary=" + "b" * 200, b"x"),
        ("application/x-www-form-urlencoded; charset=none", b"reason=x"),
        ("application/x-www-form-urlencoded; charset=utf-16", b"reason=x"),
        ("application/x-www-form-urlencoded", b"reason=%ff&%00=%80"),
        ("application/x-www-form-urlencoded", b"reason=" + b"x" * 100_000),
        ("application/json", b"{}"),
        ("no/kind; of=content;;;", b"\xff\x00"),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused_or_read_as_an_empty_one(url: str, path: str, kind: str, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR}", "Content-Type": kind}
    answer = requests.post(url + path, data=body, headers=headers, timeout=patient(ANSWER_S), allow_redirects=False)
    assert answer.status_code < 500, answer.text
