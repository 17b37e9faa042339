"""Signing in and acting: what is published, what is refused, and what the run's page remembers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import structlog

from services.console.access import FAILURES
from shared import bus
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import RunConfig
from tests.ruling import status
from tests.unit.console.conftest import HOSTILE, RUN
from tests.unit.console.serving import OPERATOR, VIEWER, Console, Page, console

Scenario = Callable[[Console], Awaitable[Any]]


@pytest.fixture
def run(world, tmp_path):
    """run(scenario, **settings)"""

    def go(scenario: Scenario, **settings: Any) -> Any:
        async def within() -> Any:
            async with console(world, tmp_path, **settings) as there:
                return await scenario(there)

        return asyncio.run(within())

    return go


async def signed_in(there: Console, token: str = OPERATOR) -> str:
    """Returns the session's form key."""
    status, _, page = await there.post("/sign-in", {"token": token, "next": f"/runs/{RUN}"})
    assert status == 200
    return page.hidden("form_key")


async def end(there: Console) -> list[m.RunCommand]:
    """All commands so far."""
    await there.bus.publish(t.RUNS_COMMANDS, "last", m.RunCommand(run="last", action="pause"))
    found: list[m.RunCommand] = []
    async for delivery in there.bus.deliveries([t.RUNS_COMMANDS], None, 8):
        if delivery.message.run == "last":
            return found
        found.append(delivery.message)
    raise AssertionError


async def finish(there: Console) -> None:
    await there.bus.publish(t.RUNS_STATE, RUN, status(RUN, "finished"))
    await until(lambda: there.board.runs[RUN].state.value == "finished")


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not there():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_an_operator_pauses_resumes_and_stops_a_run_and_the_page_says_who_did_what_when_and_why(run):
    async def scenario(there: Console) -> None:
        key = await signed_in(there)
        states = []
        for action, drain in (("pause", {"drain": "off"}), ("resume", {}), ("pause", {"drain": "on"}), ("stop", {})):
            form = {"form_key": key, "reason": f"why {action} {HOSTILE}", **drain}
            status, _, page = await there.post(f"/runs/{RUN}/{action}", form)
            assert status == 200
            states.append(there.board.runs[RUN].state.value)
        assert states == ["paused", "running", "paused", "stopping"]
        for expected in ("What was done to it", "alice", "why pause <script>", "UTC"):
            assert expected in page.text
        assert "<script>alert" not in page.html
        heard = await end(there)
        assert [(c.action, c.by, c.drain) for c in heard] == [
            ("pause", "alice", False), ("resume", "alice", True), ("pause", "alice", True), ("stop", "alice", True),
        ]  # fmt: skip

    run(scenario)


def test_a_pause_trains_what_is_complete_unless_it_says_that_it_does_not(run):
    async def scenario(there: Console) -> None:
        key = await signed_in(there)
        (form,) = re.findall(
            r'action="/runs/[^"]+/pause">(.*?)</form>', (await there.get(f"/runs/{RUN}"))[2].html, re.S
        )
        fields = [a for tag, a in Page(form).elements if tag == "input" and a["name"] == "drain"]
        ticked = [("drain", a["value"]) for a in fields]
        cleared = [("drain", a["value"]) for a in fields if a["type"] != "checkbox"]
        statuses = []
        for data in ([("reason", "tea")], ticked, cleared, [("drain", "no")]):
            async with there.http.post(f"{there.url}/runs/{RUN}/pause", data=[("form_key", key), *data]) as answer:
                statuses.append(answer.status)
            await there.post(f"/runs/{RUN}/resume", {"form_key": key})
        assert statuses == [200, 200, 200, 409]
        assert [c.drain for c in await end(there) if c.action == "pause"] == [True, True, False]

    run(scenario)


def test_nothing_is_done_without_a_token_with_a_viewers_or_with_a_wrong_one(run):
    async def scenario(there: Console) -> None:
        anonymous = await there.post(f"/runs/{RUN}/pause", {})
        bearers = [
            await there.post(f"/runs/{RUN}/pause", {}, headers={"Authorization": f"Bearer {token}"})
            for token in (VIEWER, "wrong", "")
        ]
        key = await signed_in(there, VIEWER)
        viewer = await there.post(f"/runs/{RUN}/pause", {"form_key": key})
        assert [status for status, _, _ in (anonymous, *bearers, viewer)] == [401, 403, 401, 401, 403]
        assert "Pause" not in viewer[2].text
        assert await end(there) == []

    run(scenario)


def test_an_operators_token_in_a_header_acts_without_a_session(run):
    async def scenario(there: Console) -> None:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        status, answer, _ = await there.post(f"/runs/{RUN}/stop", {}, headers=headers, allow_redirects=False)
        assert (status, answer["Location"]) == (303, f"/runs/{RUN}")
        assert [(c.action, c.by) for c in await end(there)] == [("stop", "alice")]

    run(scenario)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_form_of_another_site_does_nothing_even_with_the_cookie(run, headers):
    async def scenario(there: Console) -> None:
        key = await signed_in(there)
        status, _, _ = await there.post(f"/runs/{RUN}/pause", {"form_key": key}, headers=headers)
        assert status == 403
        signing = await there.post("/sign-in", {"token": OPERATOR}, headers=headers)
        assert signing[0] == 403
        assert await end(there) == []

    run(scenario)


def test_the_cookie_alone_does_nothing_the_form_must_have_been_ours(run):
    async def scenario(there: Console) -> None:
        await signed_in(there)
        statuses = [(await there.post(f"/runs/{RUN}/pause", form))[0] for form in ({}, {"form_key": "x"})]
        assert statuses == [403, 403]
        assert await end(there) == []

    run(scenario)


def test_the_cookie_is_out_of_reach_of_scripts_and_of_other_sites_and_is_not_the_token(run):
    async def scenario(there: Console) -> None:
        form = {"token": OPERATOR}
        _, headers, _ = await there.post("/sign-in", form, allow_redirects=False)
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert OPERATOR not in cookie
        assert int(re.findall(r"Max-Age=(\d+)", cookie)[0]) <= 24 * 3600

    run(scenario)


def test_signing_out_ends_the_session_for_whoever_kept_its_cookie(run):
    async def scenario(there: Console) -> None:
        key = await signed_in(there)
        kept = {c.key: c.value for c in there.http.cookie_jar}
        await there.post("/sign-out", {"form_key": key})
        status, _, _ = await there.post(f"/runs/{RUN}/pause", {"form_key": key}, cookies=kept)
        assert status == 401
        assert await end(there) == []

    run(scenario)


def test_wrong_tokens_are_soon_told_to_wait_and_a_right_one_from_the_same_address_passes(run):
    async def scenario(there: Console) -> None:
        statuses = [(await there.post("/sign-in", {"token": f"wrong-{i}"}))[0] for i in range(FAILURES)]
        assert statuses == [401] * FAILURES
        status, headers, page = await there.post("/sign-in", {"token": "wrong"})
        assert (status, int(headers["Retry-After"]) > 0) == (429, True)
        assert "Content-Security-Policy" in headers
        assert OPERATOR not in page.html
        for token, expected in (("wrong", 429), (OPERATOR, 200), ("wrong", 429)):
            bearer = {"Authorization": f"Bearer {token}"}
            assert (await there.post(f"/runs/{RUN}/stop", {}, headers=bearer))[0] == expected
        await signed_in(there)
        assert [(c.action, c.by) for c in await end(there)] == [("stop", "alice")]

    run(scenario)


def test_where_reading_needs_a_token_nothing_of_a_run_is_shown_without_one_and_probes_go_on(run):
    async def scenario(there: Console) -> None:
        for path in ("/", f"/runs/{RUN}", f"/runs/{RUN}/attempts/a-0", "/alerts", "/nowhere"):
            status, _, page = await there.get(path)
            assert (status, "Sign in" in page.text) == (200, True)  # sent there
            assert RUN not in page.text
        assert [(await there.get(path))[0] for path in ("/healthz", "/metrics", "/static/console.css")] == [200] * 3
        await signed_in(there, VIEWER)
        assert RUN in (await there.get("/"))[2].text
        assert "4 of the last 4" in (await there.get(f"/runs/{RUN}/attempts"))[2].text

    run(scenario, console_reading="token")


def test_an_action_that_does_not_fit_the_runs_state_is_refused_and_an_unknown_run_or_action_is_not_there(run):
    async def scenario(there: Console) -> None:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        paths = (f"/runs/{RUN}/resume", "/runs/none/pause", f"/runs/{RUN}/delete")
        assert [(await there.post(path, {}, headers=headers))[0] for path in paths] == [409, 404, 404]
        assert (await there.get(f"/runs/{RUN}/pause", headers=headers))[0] == 405
        assert await end(there) == []

    run(scenario)


def test_a_bus_that_is_away_is_said(run, tmp_path):
    async def scenario(there: Console) -> None:
        there.access.bus = closed = bus.connect("sqlite:" + str(tmp_path / "other.db"), client="closed")
        await closed.close()
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        status, _, page = await there.post(f"/runs/{RUN}/pause", {}, headers=headers)
        assert status == 503
        assert "does not answer" in page.text

    run(scenario)


def test_a_new_run_is_started_as_an_old_one_was_but_for_what_the_form_says(run, world):
    async def scenario(there: Console) -> None:
        key = await signed_in(there)
        assert "Start another like it" not in (await there.get(f"/runs/{RUN}"))[2].text
        await finish(there)
        assert "Start another like it" in (await there.get(f"/runs/{RUN}"))[2].text
        form = {"form_key": key, "reason": "again", "minutes": "2.5", "max_steps": "", "seed": "7"}
        status, _, page = await there.post(f"/runs/{RUN}/start", form)
        assert status == 200
        (name,) = set(there.board.runs) - {RUN}
        assert f"as {RUN} was again" in page.text
        word = (await end(there))[-1]
        assert (word.run, word.action, word.by, word.reason) == (name, "start", "alice", f"as {RUN} was again")
        assert word.config is not None
        config = msgspec.json.decode(world.objects.get(word.config), type=RunConfig)
        schedule = msgspec.structs.replace(world.config.schedule, minutes=2.5)
        assert config == msgspec.structs.replace(world.config, run=name, seed=7, schedule=schedule)
        second = await there.post(f"/runs/{RUN}/start", form)
        assert second[0] == 409
        assert f"{name} is running" in second[2].text

    run(scenario)


def test_no_run_is_started_beside_one_that_goes_on_by_who_may_not_or_with_what_is_no_number(run):
    async def scenario(there: Console) -> None:
        operator, viewer = ({"Authorization": f"Bearer {token}"} for token in (OPERATOR, VIEWER))
        beside = await there.post(f"/runs/{RUN}/start", {}, headers=operator)
        assert (beside[0], f"{RUN} is running" in beside[2].text) == (409, True)
        await finish(there)
        refused = [
            ({}, {}, 401),
            (viewer, {}, 403),
            (operator, {"minutes": "nan"}, 409),
            (operator, {"minutes": "-1"}, 409),
            (operator, {"minutes": "1e9"}, 409),
            (operator, {"max_steps": "²"}, 409),
            (operator, {"seed": "0x7"}, 409),
        ]
        for headers, form, expected in refused:
            assert (await there.post(f"/runs/{RUN}/start", form, headers=headers))[0] == expected, form
        assert (await there.post("/runs/none/start", {}, headers=operator))[0] == 404
        assert [word.action for word in await end(there)] == []

    run(scenario)


def test_no_run_is_started_while_the_past_is_still_read(run):
    async def scenario(there: Console) -> None:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        await finish(there)
        await until(lambda: there.board.complete)
        there.board.complete = False
        status, _, page = await there.post(f"/runs/{RUN}/start", {}, headers=headers)
        assert (status, "has not all been read yet" in page.text) == (409, True)
        there.board.complete = True
        assert (await there.post(f"/runs/{RUN}/start", {}, headers=headers))[0] == 200

    run(scenario)


def test_two_clicks_at_once_start_one_run(run):
    async def scenario(there: Console) -> None:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        await finish(there)
        both = await asyncio.gather(*[there.post(f"/runs/{RUN}/start", {}, headers=headers) for _ in range(2)])
        assert sorted(status for status, _, _ in both) == [200, 409]
        assert [word.action for word in await end(there)] == ["start"]

    run(scenario)


def test_a_run_whose_parts_are_gone_is_not_started_again(run, world):
    async def scenario(there: Console) -> None:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        await finish(there)
        kept = world.objects.get(world.config.pack_hidden)
        world.objects.delete(world.config.pack_hidden.key)
        try:
            status, _, page = await there.post(f"/runs/{RUN}/start", {}, headers=headers)
        finally:
            world.objects.put(world.config.pack_hidden.key, kept)
        assert (status, f"{world.config.pack_hidden.key}: what {RUN} was made of is gone" in page.text) == (409, True)
        assert [word.action for word in await end(there)] == []

    run(scenario)


@pytest.mark.parametrize(
    ("kind", "status"), [("application/x-www-form-urlencoded; charset=none", 400), ("multipart/form-data", 415)]
)
def test_what_is_no_form_of_ours_is_refused_and_nothing_is_done(run, kind, status):
    async def scenario(there: Console) -> None:
        for path in (f"/runs/{RUN}/pause", "/sign-in", "/sign-out"):
            async with there.http.post(there.url + path, data=b"reason=x", headers={"Content-Type": kind}) as answer:
                assert answer.status == status, path
        assert await end(there) == []

    run(scenario)


def test_who_did_what_from_where_stands_in_the_log_sign_ins_and_refusals_too(run):
    async def scenario(there: Console) -> list[Any]:
        with structlog.testing.capture_logs() as lines:
            await there.post("/sign-in", {"token": "wrong"})
            key = await signed_in(there)
            await there.post(f"/runs/{RUN}/pause", {"form_key": key, "reason": "tea"})
            await there.post(f"/runs/{RUN}/pause", {"form_key": key})
            await there.post("/sign-out", {"form_key": key})
            await there.post(f"/runs/{RUN}/stop", {})
        return lines

    lines = [line for line in run(scenario) if line.get("address")]
    assert {line["address"] for line in lines} == {"127.0.0.1"}
    who = [(line["event"], line.get("who", line.get("by")), line.get("action", line.get("path"))) for line in lines]
    assert who == [
        ("sign_in_failed", None, None),
        ("signed_in", "alice", None),
        ("action", "alice", "pause"),
        ("refused", "alice", f"/runs/{RUN}/pause"),
        ("signed_out", "alice", None),
        ("refused", "", f"/runs/{RUN}/stop"),
    ]
    assert OPERATOR not in str(lines)


def test_going_back_names_a_published_version_and_is_one_word_of_its_own(run):
    async def scenario(there: Console) -> None:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        forms = [{"version": "2"}, {"version": "2"}, {"version": "0"}, {"version": "99"}, {"version": "²"}, {}]
        statuses = [(await there.post(f"/runs/{RUN}/rollback", form, headers=headers))[0] for form in forms]
        assert statuses == [200, 200, 409, 409, 409, 409]
        _, _, page = await there.get(f"/runs/{RUN}")
        assert "rollback to version 2" in page.text
        assert there.board.runs[RUN].state.value == "running"
        first, second = await end(there)
        assert (first.action, first.serial, first.by) == ("rollback", 2, "alice")
        assert first.id
        assert first.id != second.id

    run(scenario)
