"""Finds the API that a URL speaks: SGLang's `/generate` (ours and plain servers) or chat completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

Told = Callable[[str], None]
PATIENCE_S = 10.0


class Unreachable(Exception):
    """No policy answers at the URL; the text says what was tried and what came back."""


@dataclass(frozen=True, slots=True)
class Found:
    """`url`: the base for requests. `model`: the directory (generate) or the name (chat) that the server serves; empty: it does
    not say. `versioned`: its weight version is the serial of a published version."""

    api: Literal["generate", "chat"]
    url: str
    model: str = ""
    versioned: bool = False


async def look(url: str, api: str, key: str) -> Found:
    """Ask the URL which API it speaks. `api`: auto, or the one that must be there. Raises Unreachable."""
    tried: list[str] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
        if api != "chat" and not url.endswith("/v1"):
            for path in ("/model_info", "/get_model_info"):  # the second is SGLang's older name
                if (info := await _ask(session, url + path, "", tried)) is not None:
                    return await _generate(session, url, info)
        if api != "generate":
            base = url if url.endswith("/v1") else f"{url}/v1"
            if (models := await _ask(session, f"{base}/models", key, tried)) is not None:
                return Found("chat", base, _first(models))
            if api == "chat" and any(
                "HTTP 404" in line for line in tried
            ):  # a server may list no models and still talk
                return Found("chat", base)
    raise Unreachable(
        f"--policy {url}: no policy answers there ({'; '.join(tried)}); allowed: a replica of ours, an SGLang server, or an "
        "OpenAI-compatible endpoint such as http://127.0.0.1:8000/v1"
    )


async def _generate(session: aiohttp.ClientSession, url: str, info: dict[str, Any]) -> Found:
    server = await _ask(session, f"{url}/server_info", "", []) or {}
    version = str(info.get("weight_version", "default"))
    ours = server.get("engine") == "etude" or "run" in info
    if ours and not info.get("model_path"):
        raise Unreachable(f"--policy {url}: the replica has no weights yet; its /readyz says what it waits on")
    return Found("generate", url, str(info.get("model_path", "")), versioned=ours and version.isdecimal())


async def _ask(session: aiohttp.ClientSession, url: str, key: str, tried: list[str]) -> dict[str, Any] | None:
    """Return the JSON object, or None; `tried` gets a line about it then. Raises Unreachable where no server listens."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with session.get(url, headers=headers) as response:
            if response.status == 200:
                found = await response.json(content_type=None)
                if isinstance(found, dict):
                    return found
            tried.append(f"GET {url}: HTTP {response.status}")
    except aiohttp.ClientConnectorError as error:  # nobody is there: other paths will not help
        raise Unreachable(
            f"--policy {url.rpartition('/')[0]}: {error}; start the server, or name another URL"
        ) from None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        tried.append(f"GET {url}: {error or type(error).__name__}")
    return None


def _first(models: dict[str, Any]) -> str:
    data = models.get("data")
    first = data[0] if isinstance(data, list) and data else None
    return str(first.get("id", "")) if isinstance(first, dict) else ""
