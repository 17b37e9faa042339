"""Requests that a page of another site made somebody's browser send."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit


def foreign(headers: Mapping[str, str], host: str) -> bool:
    """Whether a browser says that the page which asks `host` for something is not of it. What is no browser says nothing.
    A page may send a form anywhere, an address of this machine too: that it cannot read the answer undoes nothing."""
    origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
    if site is not None:  # a proxy between the two may have asked by another name of ours: the browser knows
        return site not in ("same-origin", "none")
    try:
        return origin is not None and urlsplit(origin).netloc != host
    except ValueError:  # no address at all
        return True
