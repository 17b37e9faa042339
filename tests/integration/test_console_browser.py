"""The console's pages in a real browser: they can be read, keep themselves fresh, and let nothing that an agent wrote act."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pytest

from shared.contracts import messages as m
from shared.contracts.ids import attempt_prefix
from shared.contracts.trajectory import Segment, Span, Trajectory, pack
from tests.integration.console_browser_world import (
    ATTACKS,
    Console,
    barriers,
    browser,
    console,
    scheduled,
    served,
    visit,
    visiting,
)
from tests.ruling import status
from tests.unit.console.conftest import RUN, World, world
from tests.unit.console.repository_attempt import RepositoryWorld, repository

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
__all__ = ["browser", "console", "repository", "scheduled", "visit", "world"]  # fixtures

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
BETWEEN_LOOKS_MS = 12_000  # longer than a page waits
LONG = 200_000  # tokens of a long attempt


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
    assert barriers(visit(path, color_scheme=scheme)) == []


def test_a_page_takes_over_what_is_new_and_leaves_a_reader_alone(visit: Callable[..., Any], console: Console) -> None:
    page = visit("/alerts")
    page.clock.install()
    page.reload()
    assert page.get_by_text("fresh news").count() == 0
    console.tell(m.Alert(run=RUN, name="fresh", severity="critical", what="fresh news", examples=["one"]))
    page.clock.run_for(BETWEEN_LOOKS_MS)
    page.get_by_text("fresh news").wait_for()
    page.locator("details").first.locator("summary").click()
    console.tell(m.Alert(run=RUN, name="later", severity="critical", what="later news"))
    page.clock.run_for(2 * BETWEEN_LOOKS_MS)
    page.wait_for_load_state("networkidle")
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
        console.tell(m.RunCommand(run=attack, action="stop", reason=attack, by=attack))
        console.tell(m.RunCommand(run=RUN, action="rollback", serial=number, reason=attack, by=attack))
        console.tell(m.PolicyApplied(run=RUN, replica=attack, url="x", serial=1, pause_s=0.1, ok=False, reason=attack))
        console.tell(m.EvalFinished(run=RUN, eval=attack, serial=1, report=world.config.base, figures={attack: 1.0}))
    console.tell(status(RUN, "stopping", reason=ATTACKS[0]))
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_attempt_on_a_repository_fits_its_window_and_has_no_barrier(
    repository: RepositoryWorld, browser: Any, tmp_path: Path, scheme: str
) -> None:
    """Unfolded, too: the middle of long output, thinking, the whole prompt."""
    with served(repository, tmp_path) as there, visiting(browser, there) as visit:
        for width in (1280, 380):
            page = visit(f"/runs/{RUN}/attempts/a-3", color_scheme=scheme, viewport={"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{width} wide"
            page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{width} wide, unfolded"
            assert page.heard == []
            assert width < 1280 or barriers(page) == []


def test_a_very_long_attempt_opens_in_parts(visit: Callable[..., Any], console: Console, world: World) -> None:
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
    page.goto(f"{console.url}/runs/{RUN}/attempts/long")
    page.get_by_role("link", name="after", exact=True).click()
    page.get_by_text("tokens 1500–3000 of 200000").wait_for()
    assert page.heard == []
