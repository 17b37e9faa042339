"""Who is let in, for how long, and how many wrong tokens are borne: the pure part."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console import access as a
from services.console import keys
from services.console.config import ConsoleSettings
from tests.patience import patient

ALICE, VICTOR = a.Person("alice", a.Role.operator), a.Person("victor", a.Role.viewer)
TOKENS = a.Tokens({ALICE: "x" * 20, VICTOR: "y" * 20})


def test_a_token_belongs_to_its_holder_and_anything_else_to_nobody():
    assert (TOKENS.holder("x" * 20), TOKENS.holder("y" * 20)) == (ALICE, VICTOR)
    for wrong in ("", "x" * 19, "x" * 21, "X" * 20, "é" * 20, "\udc80", "x" * 100_000):
        assert TOKENS.holder(wrong) is None


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "é" * 20, "with a space in it all", "line\nbreak-and-more-text"]
)
def test_a_token_that_is_easily_guessed_or_cannot_be_sent_is_refused_without_quoting_it(token):
    with pytest.raises(ValueError, match="alice") as refusal:
        a.Tokens({ALICE: token})
    assert not token or token not in str(refusal.value)


def test_two_people_never_share_a_token():
    with pytest.raises(ValueError, match="same token"):
        a.Tokens({ALICE: "x" * 20, VICTOR: "x" * 20})


def test_a_session_lasts_its_time_and_no_longer_and_ends_when_it_is_ended():
    sessions = a.Sessions()
    first, second = sessions.begin(ALICE, 0.0), sessions.begin(VICTOR, 0.0)
    assert first != second
    assert sessions.find(first, a.SESSION_S - 1).person == ALICE
    assert sessions.find(first, 1.0).form_key != sessions.find(second, 1.0).form_key
    assert sessions.find(first, a.SESSION_S) is None
    sessions.end(second)
    assert sessions.find(second, 1.0) is None
    assert sessions.find("", 0.0) is None


def test_sessions_are_bounded_and_the_oldest_goes():
    sessions = a.Sessions()
    names = [sessions.begin(ALICE, 0.0) for _ in range(a.SESSIONS + 1)]
    assert sessions.find(names[0], 0.0) is None
    assert all(sessions.find(name, 0.0) for name in names[1:])


def test_wrong_tokens_are_borne_a_few_times_then_one_at_a_time_and_others_are_not_punished():
    failures = a.Failures()
    for _ in range(a.FAILURES):
        assert failures.wait("1.2.3.4", 100.0) == 0
        failures.note("1.2.3.4", 100.0)
    wait = failures.wait("1.2.3.4", 100.0)
    assert 0 < wait <= a.FAILURE_S
    assert failures.wait("5.6.7.8", 100.0) == 0
    assert failures.wait("1.2.3.4", 100.0 + wait + 0.01) == 0


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 5)), max_size=400))
def test_however_many_addresses_are_used_the_wrong_tokens_borne_in_a_time_are_bounded(tries):
    failures, now, borne = a.Failures(), 0.0, 0
    for address, pause in tries:
        now += pause
        if failures.wait(str(address), now) == 0:
            failures.note(str(address), now)
            borne += 1
    assert borne <= a.FAILURES_ALL + now * a.FAILURES_ALL / a.FAILURES / a.FAILURE_S + 1


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/runs/r?x=1", "/runs/r?x=1"),
        ("//evil.example", "/"),
        ("https://evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/a\r\nSet-Cookie: x", "/"),
        ("", "/"),
    ],
)
def test_after_signing_in_nobody_is_sent_elsewhere(text, path):
    assert a.local_path(text) == path


def test_the_first_start_makes_a_token_that_only_its_owner_can_read_and_later_ones_keep_it(tmp_path):
    settings = ConsoleSettings(state=tmp_path)
    known, file = keys.tokens(settings)
    assert file == tmp_path / "console" / "token"
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip()
    assert len(token) >= 43  # 256 bits
    assert known.holder(token) == a.Person("operator", a.Role.operator)
    assert keys.tokens(settings)[0].holder(token) is not None
    assert [path.name for path in file.parent.iterdir()] == ["token"]
    file.chmod(0o644)
    with pytest.raises(keys.Unusable, match="others may read it"):
        keys.tokens(settings)


def test_tokens_of_the_settings_are_used_and_no_file_is_made(tmp_path):
    settings = ConsoleSettings(
        state=tmp_path, console_token="t" * 20, console_operators={"ann": "a" * 20}, console_viewers={"vic": "v" * 20}
    )
    known, file = keys.tokens(settings)
    assert file is None
    assert not (tmp_path / "console").exists()
    holders = [known.holder(letter * 20) for letter in "tav"]
    assert [(h.name, h.may_act) for h in holders if h] == [("operator", True), ("ann", True), ("vic", False)]


@pytest.mark.parametrize(
    "people",
    [
        {"console_token": "short"},
        {"console_token": "t" * 20, "console_operators": {"operator": "a" * 20}},
        {"console_operators": {"ann": "a" * 20}, "console_viewers": {"ann": "b" * 20}},
        {"console_operators": {"ann": "a" * 20, "bob": "a" * 20}},
        {"console_operators": {"scheduler": "a" * 20}},  # its own words are no news to the scheduler
        {"console_viewers": {" ": "a" * 20}},
        {"console_operators": {"a\u202eb": "a" * 20}},
    ],
)
def test_people_who_cannot_be_told_apart_are_refused(tmp_path, people):
    with pytest.raises(keys.Unusable):
        keys.tokens(ConsoleSettings(state=tmp_path, **people))


@pytest.mark.parametrize(
    ("host", "reading", "open_to_readers"),
    [
        ("127.0.0.1", "auto", True),
        ("::1", "auto", True),
        ("localhost", "auto", True),
        ("0.0.0.0", "auto", False),
        ("10.0.0.3", "auto", False),
        ("console.example", "auto", False),
        ("0.0.0.0", "open", True),
        ("127.0.0.1", "token", False),
    ],
)
def test_reading_is_open_only_where_nobody_else_can_reach_or_where_it_is_said(tmp_path, host, reading, open_to_readers):
    settings = ConsoleSettings(state=tmp_path, host=host, console_reading=reading)
    assert settings.open_to_readers is open_to_readers


def test_no_token_is_printed_by_check_or_by_an_error(tmp_path):
    secret = "a-secret-token-0123456789"
    people = {
        "ETUDE_STATE": str(tmp_path),
        "ETUDE_CONSOLE_TOKEN": secret,
        "ETUDE_CONSOLE_OPERATORS": f'{{"ann": "{secret}"}}',
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    for arguments in (["--check"], []):  # the second start fails: two people have one token
        command = [sys.executable, "-m", "services.console", *arguments]
        done = subprocess.run(
            command, env={**os.environ, **people}, capture_output=True, text=True, timeout=patient(140)
        )
        assert done.returncode == (0 if arguments else 1)
        assert secret not in done.stdout + done.stderr
