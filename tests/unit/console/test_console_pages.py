"""The pages over HTTP: what they show, and that nothing an agent made can act in the reader's browser."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

from services.console.board import Board
from services.console.config import ConsoleSettings
from services.console.library import Library
from services.console.openapi import OPERATIONS
from services.console.pages import build_app
from shared import bus
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.life import RunState, offered
from tests.patience import patient
from tests.unit.console.conftest import HOSTILE, RUN
from tests.unit.console.serving import access, console


@pytest.fixture
def visit(world, tmp_path):
    """visit(path, …): what a console that nobody has signed in to answers, (status, headers, Page) for each."""

    def go(*paths, headers=None):
        async def scenario():
            async with console(world, tmp_path) as there:
                return [await there.get(path, headers=headers) for path in paths]

        return asyncio.run(scenario())

    return go


PAGES = [
    "/",
    f"/runs/{RUN}",
    f"/runs/{RUN}/attempts",
    f"/runs/{RUN}/attempts/a-0",
    f"/runs/{RUN}/attempts/a-3",
    "/alerts",
]


def test_nothing_hostile_reaches_the_browser_as_markup_or_control_characters(visit):
    for path, (status, headers, page) in zip(PAGES, visit(*PAGES), strict=True):
        assert status == 200, path
        scripts = [attributes for tag, attributes in page.elements if tag == "script"]
        assert [script.get("src") for script in scripts] == ["/static/console.js"], path
        assert not any(name.startswith("on") or name == "style" for _, found in page.elements for name in found), path
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", page.html), path
        assert "7*7" in page.html or "49" not in page.text
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_nothing_is_loaded_from_elsewhere(visit):
    for _, _, page in visit(*PAGES):
        for tag, attributes in page.elements:
            if tag in ("script", "link", "img", "iframe"):
                assert (attributes.get("src") or attributes.get("href") or "").startswith("/static/")


def test_hostile_text_is_shown_in_full_and_by_name(visit):
    (_, _, page), (_, _, alerts) = visit(f"/runs/{RUN}/attempts/a-0", "/alerts")
    for shown in (page.text, alerts.text):
        assert "<script>alert(1)</script> ⟨ESC⟩[2J⟨ESC⟩]0;owned⟨BEL⟩ ⟨U+202E⟩gnp.exe ⟨U+200B⟩{{7*7}} '\"&" in shown


def test_the_overview_shows_runs_services_replicas_and_alerts(visit):
    ((_, _, page),) = visit("/")
    for expected in (RUN, "running", "engine-0", "version 3", "drift", "console", "ready"):
        assert expected in page.text
    assert f"/runs/{RUN}" in [attributes.get("href") for tag, attributes in page.elements if tag == "a"]


def test_a_run_shows_its_curves_and_configuration(visit):
    ((_, _, page),) = visit(f"/runs/{RUN}")
    labels = [attributes["aria-label"] for tag, attributes in page.elements if tag == "svg"]
    assert [label.split(":")[0] for label in labels] == [
        "Reward", "Pass rate", "Tokens", "Broken calls", "Age", "Entropy", "Mismatch k3", "Prefix saved", "Seconds",
    ]  # fmt: skip
    assert page.html.count("<polyline") == len(labels) + 1  # the seconds of a step share a chart
    for expected in ("hardness-weighted", "pass_at_1", "0.31", "submitted"):
        assert expected in page.text


def test_attempts_that_a_worker_or_a_grader_lost_are_counted(world, tmp_path):
    async def scenario():
        async with console(world, tmp_path) as there:
            finished, scored = t.ROLLOUTS_FINISHED, t.ROLLOUTS_SCORED
            for topic, attempt in ((finished, "a-7"), (finished, "a-8"), (scored, "a-9"), (scored, "a-9")):
                key = m.AttemptKey(attempt=attempt, epoch=1, group="g-1", problem="p-1")
                failed = m.RolloutFailed(run=RUN, key=key, reason="no sandbox", worker="w")
                await there.bus.publish(topic, attempt, failed)
            async with asyncio.timeout(10):
                while there.board.runs[RUN].failed < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            _, _, page = await there.get(f"/runs/{RUN}")
            assert re.search(r"Lost to infrastructure\s*3\b", page.text)

    asyncio.run(scenario())


def test_attempts_can_be_filtered_and_an_unknown_page_or_filter_is_harmless(visit):
    paths = [
        f"/runs/{RUN}/attempts{query}"
        for query in ("", "?outcome=solved", "?problem=none", "?page=99999", "?page=-1&outcome=x")
    ]
    counts = [page.html.count("/attempts/a-") for _, _, page in visit(*paths)]
    assert counts == [4, 2, 0, 4, 4]


def test_an_attempt_reads_as_a_conversation_with_problem_difference_and_tokens(visit, world):
    ((_, _, page),) = visit(f"/runs/{RUN}/attempts/a-3")
    for expected in ("solved", "prompt", "tool call", "line 3", "+    return a + 1", "-    return a - 1", "Repair it."):
        assert expected in page.text
    shown = [attributes for tag, attributes in page.elements if tag == "span" and "title" in attributes]
    scored = world.scored("a-3", version=3, solved=True)
    from shared.contracts.trajectory import unpack

    (segment,) = unpack(world.objects.get(scored.trajectory)).segments
    assert [int(a["title"].split("id ")[1].split(" ")[0]) for a in shown] == segment.tokens.tolist()


def test_a_damaged_trajectory_is_said_and_the_rest_is_shown(visit, world):
    ref = next(message.trajectory for topic, key, message in world.messages if key == "a-2")
    path = world.state / "objects" / ref.key
    good = path.read_bytes()
    try:
        path.write_bytes(good[:-1] + b"x")
        ((status, _, page),) = visit(f"/runs/{RUN}/attempts/a-2")
    finally:
        path.write_bytes(good)
    assert status == 200
    assert "ObjectDamaged" in page.text
    assert "0.900" in page.text


@pytest.mark.parametrize(
    "path",
    ["/runs/none", "/nowhere", f"/runs/{RUN}/attempts/none", "/static/../config.py", "/static/none", "/runs/%00"],
)
def test_what_is_not_there_is_a_page_that_says_so(visit, path):
    ((status, headers, page),) = visit(path)
    assert status == 404
    assert "Not found" in page.text
    assert "Content-Security-Policy" in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost:99999", "localhost:-1", "localhost:x", "[::1]:x", "a#b", "xn--\xe9"]
)
def test_a_foreign_host_name_is_refused(visit, host):
    ((status, headers, page),) = visit("/", headers={"Host": host})
    assert status == 421
    assert RUN not in page.html
    assert "Content-Security-Policy" in headers


def test_the_console_runs_as_a_process_says_what_it_waits_on_and_drains(world, tmp_path):
    async def publish():
        messages = bus.connect(f"sqlite:{tmp_path / 'bus.db'}", client="test")
        await messages.publish_many(world.messages)
        await messages.close()

    asyncio.run(publish())
    with socket.socket() as silent:  # a neighbour that listens and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        (tmp_path / "run").mkdir()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        beside = {"service": "trainer", "name": "trainer-x", "pid": 1, "url": address}
        (tmp_path / "run" / "trainer-x.json").write_text(json.dumps(beside))
        (tmp_path / "run" / "broken.json").write_text("{")
        gone = {**beside, "name": "rollout-replaced", "url": "http://replaced.invalid:8700"}
        (tmp_path / "run" / "rollout-replaced.json").write_text(json.dumps(gone))
        process = subprocess.Popen(
            [sys.executable, "-m", "services.console"],
            env={
                **os.environ,
                "ETUDE_STATE": str(tmp_path),
                "ETUDE_NAME": "console-x",
                "ETUDE_OBJECTS": f"file:{world.state / 'objects'}",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
        )
        try:
            page = ""
            file = tmp_path / "run" / "console-x.json"
            until = time.monotonic() + patient(120)
            while RUN not in page and time.monotonic() < until:
                time.sleep(0.1)
                if file.exists():
                    url = json.loads(file.read_text() or "{}").get("url")
                    page = urlopen(url, timeout=patient(10)).read().decode() if url else ""
            assert RUN in page
            assert "trainer-x" in page
            assert "silent" in page
            assert "rollout-replaced" not in page
            with urlopen(f"{url}/readyz", timeout=patient(10)) as answer:
                assert json.load(answer)["ready"]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(patient(60)) == 0
        assert not file.exists()


def test_hostile_is_hostile():
    assert all(part in HOSTILE for part in ("<script>", "\x1b", "\u202e"))


def test_the_document_names_every_route_and_no_other(world, tmp_path):
    settings = ConsoleSettings(state=tmp_path)
    app = build_app(settings, Board(10), Library(world.objects, settings.formats), access())
    served = {(r.method.lower(), r.resource.canonical) for r in app.router.routes() if r.resource}
    actions = {
        (method, path.replace("{action}", action))
        for method, path in served
        for action in set(sum(map(offered, RunState), ()))
    }
    told = {(one.method, one.path) for one in OPERATIONS} | {("get", "/openapi.json")}
    assert {route for route in actions if route[0] != "head"} == told
