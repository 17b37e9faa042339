"""Settings: what is wrong is named, with the way out, and nothing secret is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import ArgumentError

from services.__main__ import settings_classes, wrong
from services.console.config import ConsoleSettings
from shared import bus, objects
from shared.ledger import engine as ledger
from shared.settings import CLOSE, ServiceSettings, declared, load, masked, without_credentials


def refused(capsys: pytest.CaptureFixture[str], cls: type[ServiceSettings] = ServiceSettings) -> str:
    with pytest.raises(SystemExit) as exit_:
        load(cls, [])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_a_bad_value_is_named_with_its_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_PORT", "70000")
    assert "ETUDE_PORT" in (said := refused(capsys))
    assert "'70000'" in said


def test_a_slip_in_a_name_is_no_setting_passed_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_LOG_LEVL", "DEBUG")
    assert "ETUDE_LOG_LEVL: not known; did you mean ETUDE_LOG_LEVEL?" in refused(capsys)


def test_a_setting_of_another_service_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_ROLLOUT_CONCURRENCY", "3")
    assert load(ServiceSettings, []).log_level == "INFO"


@pytest.mark.parametrize(("text", "said"), [(None, "No such file"), ("x = = 3", "no TOML"), ("bogus = 1", "bogus")])
def test_a_broken_file_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    said: str,
) -> None:
    path = tmp_path / "etude.toml"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("ETUDE_CONFIG", str(path))
    assert said in refused(capsys)


def test_the_environment_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "etude.toml"
    path.write_text('log_level = "ERROR"\nport = 7\n')
    monkeypatch.setenv("ETUDE_CONFIG", str(path))
    monkeypatch.setenv("ETUDE_PORT", "8")
    settings = load(ServiceSettings, [])
    assert (settings.log_level, settings.port) == ("ERROR", 8)


def test_check_prints_no_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_LEDGER", "postgresql://etude:hush@db/etude")
    monkeypatch.setenv("ETUDE_BUS", "kafka://etude:hush@kafka:9092/team")
    monkeypatch.setenv("ETUDE_JOBS", "redis://:hush@redis:6379/0")
    monkeypatch.setenv("ETUDE_S3_SECRET_KEY", "hush")
    with pytest.raises(SystemExit):
        load(ServiceSettings, ["--check"])
    shown = capsys.readouterr().out
    assert "hush" not in shown
    assert "ledger = 'postgresql://etude:***@db/etude'" in shown


@pytest.mark.parametrize("cls", settings_classes(), ids=lambda cls: cls.__name__)
def test_help_lists_what_a_service_can_be_told_even_while_a_setting_is_bad(
    cls: type[ServiceSettings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_PORT", "70000")
    with pytest.raises(SystemExit) as exit_:
        load(cls, ["--help"])
    said = capsys.readouterr().out
    assert exit_.value.code == 0
    assert all(f"ETUDE_{name.upper()}" in said for name in cls.model_fields)
    assert "Undefined" not in said


@pytest.mark.parametrize(
    "value", ['{"ann": 271828}', '["271828"]', '{"ann": ["271828"]}', '{"ann": 271828', "271828"], ids=lambda _: ""
)
def test_a_refused_secret_is_not_repeated(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_CONSOLE_OPERATORS", value)
    said = refused(capsys, ConsoleSettings)
    assert "271828" not in said
    assert "ETUDE_CONSOLE_OPERATORS" in said or "console_operators" in said


def test_a_slip_in_the_name_of_a_secret_does_not_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etude.toml").write_text('s3_secret = "hush"\n')
    monkeypatch.setenv("ETUDE_CONFIG", str(tmp_path / "etude.toml"))
    said = refused(capsys)
    assert "hush" not in said
    assert "s3_secret'" in said


@pytest.mark.parametrize("connect", [bus.connect, ledger.connect, objects.connect])
@pytest.mark.parametrize(
    "before", ["Kafka://user:", "kafka:user:", "S3//user:", "s3://user:", "kafka://user:a@", "kafka://u/s:"]
)
def test_an_address_that_cannot_be_read_is_told_without_its_password(
    connect: Callable[..., object], before: str
) -> None:
    with pytest.raises((ValueError, ArgumentError)) as error:
        connect(f"{before}hush/x@host:9092", **({"client": "t"} if connect is bus.connect else {}))
    assert "hush" not in str(error.value)


def test_an_address_that_cannot_be_read_is_told_but_for_its_password() -> None:
    assert without_credentials("Kafka://user:p@ss@host:9092/team") == "Kafka://…@host:9092/team"
    assert without_credentials("Sqlite:bus.db") == "Sqlite:bus.db"


@given(st.text("abcXYZ019%._~-", min_size=8).filter(lambda word: word not in "postgresql://user@host:5432/etude***"))
def test_no_password_of_a_url_is_shown(password: str) -> None:
    shown = masked(f"postgresql://user:{password}@host:5432/etude")
    assert password not in shown
    assert shown.startswith("postgresql://user:")
    assert shown.endswith("@host:5432/etude")
    assert password not in masked(f"redis://:{password}@host:6379/0")


@pytest.mark.parametrize(
    "url", ["sqlite:bus.db", "s3://bucket@host:9000", "kafka://a:9092,b:9092/team", "", "file:/a@b:c"]
)
def test_an_address_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert masked(url) == url


def test_one_file_serves_every_service_and_a_name_that_none_declares_is_refused_by_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "etude.toml"
    path.write_text('log_level = "ERROR"\nconsole_attempts = 50\ndraft_tokens = 2\n')
    monkeypatch.setenv("ETUDE_CONFIG", str(path))
    for cls in (*settings_classes(), ServiceSettings):
        assert load(cls, []).log_level == "ERROR"
    assert load(ConsoleSettings, []).console_attempts == 50
    path.write_text("draft_token = 2\n")
    for cls in (*settings_classes(), ServiceSettings):
        assert f"setting 'draft_token' in {path}: not known; did you mean 'draft_tokens'?" in refused(capsys, cls)


def test_a_slip_in_the_name_of_another_services_variable_is_refused_by_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_ROLLOUT_CONCURENCY", "4")
    for cls in (*settings_classes(), ServiceSettings):
        assert "ETUDE_ROLLOUT_CONCURENCY: not known; did you mean ETUDE_ROLLOUT_CONCURRENCY?" in refused(capsys, cls)


def test_the_settings_of_all_services_are_checked_together_and_each_slip_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert wrong() == []
    (tmp_path / "etude.toml").write_text("draft_tokens = 99\n")
    monkeypatch.setenv("ETUDE_CONFIG", str(tmp_path / "etude.toml"))
    monkeypatch.setenv("ETUDE_PORT", "abc")
    first, second = sorted(wrong())
    assert f"'draft_tokens' in {tmp_path / 'etude.toml'}: found 99: " in first
    assert "ETUDE_PORT: found 'abc': " in second


def test_a_word_of_etude_that_is_no_setting_is_taken_for_none() -> None:
    """Variables of compose, of tests and of images stand in the same environment."""
    root = Path(__file__).parents[3]
    found = [p for d in ("infra", "tests", "etude", "shared", "services") for p in (root / d).rglob("*") if p.is_file()]
    files = [p for p in found if "__pycache__" not in p.parts]
    texts = [
        p.read_bytes().decode(errors="ignore") for p in [*files, root / "docker-compose.yml"] if p != Path(__file__)
    ]
    known = {f"ETUDE_{name.upper()}" for name in declared()}
    words = {word for text in texts for word in re.findall(r"ETUDE_[A-Z0-9_]*[A-Z0-9]", text)} - known
    assert len(words) > 10
    assert not {word: like for word in words if (like := get_close_matches(word, known, 1, CLOSE))}


WRITTEN = {  # what people get wrong where a pattern or a structure decides, and what is said of it
    ("ETUDE_JUDGE_URL", "htp://judge:1/v1"): "did you mean http://HOST:PORT/v1? Allowed: http(s)://HOST:PORT/v1",
    ("ETUDE_JUDGE_URL", "judge:1"): "allowed: http(s)://HOST:PORT/v1",
    ("ETUDE_SGLANG_URL", "htps://engine:1"): "did you mean https://HOST:PORT? Allowed: http(s)://HOST:PORT",
    ("ETUDE_SGLANG_URL", "http://engine:1/"): "allowed: http(s)://HOST:PORT without a slash at its end",
    ("ETUDE_LOGS", "xml"): "allowed: auto, json, text",
    ("ETUDE_SANDBOX_NAMESPACE", "A_B"): "allowed: at most 63 of a-z",
    ("ETUDE_NEIGHBOURS", "reward=host:1"): 'allowed: JSON, as {"reward": ["HOST:PORT"]}',
    ("ETUDE_NEIGHBOURS", '{"reward": ["kafak://x"]}'): 'allowed: JSON, as {"reward": ["HOST:PORT"]}',
    ("ETUDE_CONSOLE_NAMES", "a.example"): 'allowed: JSON, as ["console.example.org"]',
}


@pytest.mark.parametrize(("variable", "value"), WRITTEN)
def test_a_value_of_another_form_is_refused_with_what_is_allowed(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    (line,) = wrong()
    assert line.startswith(f"setting {variable}")
    assert WRITTEN[variable, value] in line
    assert "pattern" not in line
    assert f"found {value!r}" in line or "found 'kafak://x'" in line


def test_a_secret_in_a_value_of_another_form_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_CONSOLE_VIEWERS", "ann=hush")
    (line,) = wrong()
    assert line.startswith('setting ETUDE_CONSOLE_VIEWERS: allowed: JSON, as {"NAME": "TOKEN"}')
    assert "hush" not in line


def test_every_setting_that_a_pattern_or_json_decides_says_in_words_what_is_allowed() -> None:
    for cls in settings_classes():
        for name, field in cls.model_fields.items():
            if any(getattr(rule, "pattern", None) for rule in field.metadata) or get_origin(field.annotation) in (
                list,
                dict,
            ):
                assert isinstance(field.json_schema_extra, dict), name
                assert field.json_schema_extra["allowed"], name
