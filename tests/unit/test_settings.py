"""What `--check` prints of the settings, and what it keeps to itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.settings import ServiceSettings, dump, masked


@given(st.text("abcXYZ019%._~-", min_size=8).filter(lambda word: word not in "postgresql://user@host:5432/etude***"))
def test_no_password_of_a_url_is_shown(password: str) -> None:
    shown = masked(f"postgresql://user:{password}@host:5432/etude")
    assert password not in shown
    assert shown.startswith("postgresql://user:")
    assert shown.endswith("@host:5432/etude")
    assert password not in masked(f"redis://:{password}@host:6379/0")


@pytest.mark.parametrize(
    "value", ["sqlite:.etude/bus.db", "kafka://a:9092,b:9092/team", "s3://bucket@host:9000", 5, None, True]
)
def test_what_holds_no_password_stays_as_it_is(value: object) -> None:
    assert masked(value) == value


def test_the_whole_of_the_settings_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("ETUDE_BUS", "kafka://me:geheim@h:1"),
        ("ETUDE_LEDGER", "postgresql://me:geheim@h/d"),
        ("ETUDE_JOBS", "redis://:geheim@h/0"),
        ("ETUDE_S3_SECRET_KEY", "geheim"),
    ):
        monkeypatch.setenv(name, value)
    assert "geheim" not in dump(ServiceSettings())
