"""What people do on the console's pages, in a real browser: read, follow, sign in, act; much of it by the keyboard alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shared.contracts import messages as m
from tests.integration.console_browser_world import (
    ATTACKS,
    Console,
    barriers,
    browser,
    console,
    scheduled,
    sign_in,
    visit,
)
from tests.ruling import status
from tests.unit.console.conftest import RUN, World, world
from tests.unit.console.serving import OPERATOR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
__all__ = ["browser", "console", "scheduled", "visit", "world"]  # fixtures


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
    page = visit(f"/sign-in?next=/runs/{RUN}")
    page.get_by_label("Token").fill(OPERATOR)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Sign out").wait_for()  # the address of the sign-in ends with the page's own
    for summary in page.locator("details.action > summary").all():
        summary.click()
    assert barriers(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_an_operator_goes_back_to_a_version_stops_the_run_and_starts_another_like_it(
    visit: Callable[..., Any], console: Console
) -> None:
    page = visit(f"/runs/{RUN}")
    sign_in(page)
    assert page.get_by_text("Start another like it…").count() == 0  # this one goes on
    page.get_by_text("Go back to a version…").click()
    page.get_by_role("spinbutton", name="Version").fill("2")
    page.get_by_role("button", name="Go back to a version").click()
    page.get_by_role("cell", name="rollback to version 2").wait_for()
    page.get_by_text("Stop…").click()
    page.get_by_label("Why").locator("visible=true").fill(ATTACKS[1])
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopping", exact=True).first.wait_for()
    assert page.get_by_role("row", name="alice").get_by_text(ATTACKS[1]).is_visible()
    console.tell(status(RUN, "finished"))
    page.reload()
    page.get_by_text("Start another like it…").click()
    page.get_by_role("spinbutton", name="Minutes").fill("2.5")
    page.get_by_label("Why").locator("visible=true").fill(ATTACKS[0])
    assert barriers(page) == []
    page.get_by_role("button", name="Start", exact=True).click()
    page.get_by_role("cell", name=f"as {RUN} was {ATTACKS[0]}").wait_for()
    assert page.get_by_role("heading", name="running").is_visible()
    assert f"/runs/{RUN}" not in page.url
    assert page.evaluate("window.pwned") is None
    assert page.heard == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_problems_as_a_scheduler_knows_them_are_read_sorted_and_followed_and_do_nothing(
    visit: Callable[..., Any], scheduled: None, scheme: str
) -> None:
    for query in ("", "?of=cells", "?page=2&sort=problem&order=asc", "?state=trained"):
        page = visit(f"/runs/{RUN}/problems{query}", color_scheme=scheme, viewport={"width": 1280, "height": 800})
        assert page.locator("tbody tr").count() > 1, query
        assert barriers(page) == [], query
        assert page.locator("main").locator("script, iframe, object, embed, img, style, base, meta, #link").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), query
        assert page.evaluate("window.pwned") is None
        assert page.heard == [], query
    page = visit(f"/runs/{RUN}/problems", color_scheme=scheme, viewport={"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.get_by_text(ATTACKS[0]).first.is_visible()
    page.get_by_role("link", name="Problem", exact=True).press("Enter")
    page.wait_for_url("**sort=problem**")
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Problem")
    page.get_by_role("link", name="Relatives", exact=True).first.press("Enter")
    page.wait_for_url("**of=cells**")
    assert page.heard == []


def test_attempts_are_listed_by_pages_and_by_problem(visit: Callable[..., Any], console: Console, world: World) -> None:
    scored = world.scored("a-3", version=3, solved=True)
    for number in range(70):
        key = msgspec.structs.replace(scored.key, attempt=f"many-{number}", problem=ATTACKS[number % 2])
        console.tell(msgspec.structs.replace(scored, key=key))
    page = visit(f"/runs/{RUN}/attempts")
    page.get_by_role("link", name="older").press("Enter")
    page.get_by_text("page 2 of 2").wait_for()
    assert page.get_by_role("link", name="a-0", exact=True).is_visible()
    page.get_by_role("link", name="newer").press("Enter")
    page.get_by_role("link", name=ATTACKS[0], exact=True).first.press("Enter")
    page.get_by_text("35 of the last 74 attempts").wait_for()
    assert barriers(page) == []
    page.get_by_label("Problem").fill("none")
    page.get_by_role("button", name="Show").press("Enter")
    page.get_by_text("0 of the last 74 attempts").wait_for()
    assert page.evaluate("window.pwned") is None
    assert page.heard == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_alerts_of_every_severity_are_read_with_their_examples(
    visit: Callable[..., Any], console: Console, scheme: str
) -> None:
    for severity in ("info", "warning", "critical"):
        examples = [*ATTACKS, "one"]
        console.tell(m.Alert(run=RUN, name=f"one_{severity}", severity=severity, what=ATTACKS[2], examples=examples))
    page = visit("/alerts", color_scheme=scheme)
    names = page.locator(".alerts strong").all_inner_texts()
    assert names[:3] == ["one_critical", "one_warning", "one_info"]  # the newest first
    for summary in page.locator(".alerts summary").all():
        summary.press("Enter")
    assert page.get_by_text(ATTACKS[3], exact=True).first.is_visible()
    assert barriers(page) == []
    assert page.evaluate("window.pwned") is None
    assert page.heard == []


def test_a_token_leads_to_its_figures_and_a_term_to_its_turn(visit: Callable[..., Any], world: World) -> None:
    page = visit(f"/runs/{RUN}/attempts/a-0")
    page.get_by_role("link", name="turn 2").first.press("Enter")
    assert page.evaluate("document.querySelector(':target').matches('article')")
    page.locator("a.role", has_text="tool output").press("Enter")
    page.wait_for_url("**row=*")
    first = page.locator("#figures + table tbody tr").first
    assert first.get_by_text("no: tool output").is_visible()
    assert barriers(page) == []
    assert page.heard == []
