"""Where the services of a platform answer: what they wrote below the state directory, and what names of the network lead to.

On one machine, and in containers that share a volume, every service writes `<state>/run/<name>.json` (shared.telemetry). Where each
replica has a state directory of its own, ETUDE_NEIGHBOURS gives names that resolve to all of them, such as a headless Service.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shared.settings import ServiceSettings, in_url

Resolve = Callable[[str], list[str]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`name`, `pid`: what the replica wrote about itself; "" and 0: nothing but its address is known, ask it (`/healthz`)."""

    service: str
    url: str
    name: str = ""
    pid: int = 0

    @property
    def called(self) -> str:
        """For people, also where it has not said its name."""
        return self.name or f"{self.service} at {urlsplit(self.url).netloc}"


def announced(state: Path) -> Iterator[Endpoint]:
    """Of files. One that is being written, or is none of ours, is left out."""
    for path in sorted((state / "run").glob("*.json")):
        try:
            found = json.loads(path.read_text())
            endpoint = Endpoint(str(found["service"]), found["url"], str(found["name"]), int(found["pid"]))
            if urlsplit(endpoint.url).scheme == "http":
                yield endpoint
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            continue


def addresses(host: str) -> list[str]:
    """All of the name's, sorted; none where nobody has it, as a headless Service without pods. Raises OSError where nobody
    could say."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty label, or one that is too long
        raise OSError(f"{host!r} is no name: {error}") from None
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise
    return sorted({str(info[4][0]) for info in found})


def named(neighbours: dict[str, list[str]], resolve: Resolve = addresses) -> Iterator[Endpoint]:
    """Of names: one for every address. A name that cannot be looked up stands for itself, so that its silence is seen."""
    for service, places in neighbours.items():
        for place in places:
            host, _, port = place.rpartition(":")
            try:
                found = resolve(host)
            except OSError:
                found = [host]
            for address in found:
                yield Endpoint(service, f"http://{in_url(address)}:{port}")


def find(settings: ServiceSettings, resolve: Resolve = addresses) -> list[Endpoint]:
    """All, each address once: what it wrote itself comes before what a name says. Blocking: files and names are read."""
    found = list(announced(settings.state))
    known = {endpoint.url for endpoint in found}
    return found + [endpoint for endpoint in named(settings.neighbours, resolve) if endpoint.url not in known]
