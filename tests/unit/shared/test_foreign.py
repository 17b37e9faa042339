"""Who sent a request: our own page, another site's, or no browser."""

from __future__ import annotations

import pytest

from shared.foreign import foreign


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.test"},
        {"Origin": "http://127.0.0.1:81"},
        {"Origin": "null"},
        {"Origin": "http://[evil"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:80"},
    ],
)
def test_what_another_site_sent_is_foreign(headers: dict[str, str]) -> None:
    assert foreign(headers, "127.0.0.1:80")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://127.0.0.1:80"},
        {"Origin": "https://ours.test", "Sec-Fetch-Site": "same-origin"},  # a proxy stands before us
        {"Sec-Fetch-Site": "none"},
    ],
)
def test_what_our_own_page_or_no_browser_sent_is_not(headers: dict[str, str]) -> None:
    assert not foreign(headers, "127.0.0.1:80")
