"""Asks our own services over HTTP. The only place that opens such a connection with urllib.

urllib sends requests to the proxy that `http_proxy` names, also those for 127.0.0.1. A proxy does not know our services. aiohttp
asks no proxy unless it is told to (`trust_env`).
"""

from __future__ import annotations

import urllib.request
from http.client import HTTPResponse

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(request: str | urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """Open a URL without a proxy; use it as a context manager. Raises what urllib's `urlopen` raises."""
    answer: HTTPResponse = _OPENER.open(request, timeout=timeout_s)
    return answer
