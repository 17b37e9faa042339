"""`etude status` and `etude logs`: what runs, and what it waits on."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from etude.supervisor import holder, words
from shared import direct
from shared.neighbours import Endpoint, Resolve, addresses, find
from shared.settings import REFUSED, ServiceSettings, load
from shared.visible import visible

ASKED_AT_ONCE = 32  # a silent one takes its second


def _gone(url: str) -> bool:
    """Nobody has that name any more: a container that was killed and replaced leaves its file behind."""
    try:
        socket.getaddrinfo(urlsplit(url).hostname, None)
    except socket.gaierror:
        return True
    return False


def _get(url: str, timeout_s: float = 1.0) -> dict[str, Any] | None:
    try:
        with direct.ask(url, timeout_s) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:  # /readyz answers 503 with a body
        try:
            found = json.load(error)
        except ValueError:
            return None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _ask(endpoint: Endpoint) -> tuple[Endpoint, dict[str, Any] | None]:
    """With its name, where it tells one, and its answer to whether it is ready; None: it does not answer."""
    told = endpoint
    if not endpoint.name:
        said = _get(f"{endpoint.url}/healthz") or {}
        told = replace(endpoint, name=str(said.get("name", "")))
    answer = _get(f"{endpoint.url}/readyz") if told.name else None
    return (endpoint if answer is None else told), answer


def collect(state: Path, resolve: Resolve = addresses) -> list[dict[str, Any]]:
    """One row per service: {name, pid, url, state: ready|waiting|starting|silent|refused|down, waits: [...], tells: {run: what the
    service reckons with}, restarts, ended}. refused: its settings are bad, and it is not started again. `ended`: how its last
    process ended and what it said, of a service that does not answer; empty: it answers, or none has ended."""
    try:
        supervised = json.loads((state / "supervisor.json").read_text())["services"]
    except (OSError, ValueError, KeyError):
        supervised = {}
    settings = load(ServiceSettings, []).model_copy(update={"state": state})
    asked: dict[str, tuple[Endpoint, dict[str, Any] | None]] = {}
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        for endpoint, answer in threads.map(_ask, find(settings, resolve)):
            asked.setdefault(endpoint.called, (endpoint, answer))
    return list(_rows(supervised, asked))


def _rows(
    supervised: dict[str, Any], asked: dict[str, tuple[Endpoint, dict[str, Any] | None]]
) -> Iterator[dict[str, Any]]:
    for name in dict.fromkeys([*supervised, *asked]):
        child, (endpoint, answer) = supervised.get(name, {}), asked.get(name, (None, None))
        row: dict[str, Any] = {"name": name, "pid": child.get("pid"), "restarts": child.get("restarts", 0), "waits": []}
        row["url"], row["tells"] = endpoint.url if endpoint else "", {}
        if answer is not None:
            row["state"], row["waits"] = ("ready" if answer.get("ready") else "waiting"), answer.get("waits", [])
            tells = answer.get("tells")
            row["tells"] = tells if isinstance(tells, dict) else {}
        elif endpoint and not endpoint.name:
            row["state"] = "silent"  # a name of the network says that it is there
        elif endpoint and name not in supervised and _gone(endpoint.url):
            continue
        elif child.get("last_exit") == REFUSED:
            row["state"] = "refused"
        elif child.get("pid"):
            row["state"] = "silent" if endpoint else "starting"
        else:
            row["state"] = "down"
        row["ended"] = "" if answer is not None else _ended(child)
        yield row


def _ended(child: dict[str, Any]) -> str:
    code, said = child.get("last_exit"), child.get("last_words", "")
    return "" if code is None else f"{words(code)}: {said}" if said else words(code)


def _idle(state: Path) -> str:
    """Say why no service is known here: nothing runs, or services are about to be started."""
    pid = holder(state)
    if pid is None:
        return "nothing is running here. `etude up` starts the services, `etude demo` the demo."
    return (
        f"no service runs yet. Process {pid} prepares them; a demo makes its problems first, which takes minutes, and "
        "shows its progress where it was started."
    )


def show(state: Path, *, as_json: bool) -> None:
    rows = collect(state)
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print(f"{state}: {_idle(state)}")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("service", "state", "pid", "restarts", "address", "waits on"):
        table.add_column(column)
    colours = {
        "ready": "green",
        "waiting": "yellow",
        "starting": "yellow",
        "silent": "red",
        "refused": "red",
        "down": "red",
    }
    for row in rows:
        waits = "; ".join(f"{w['waits_on']}, for {w['seconds']:.0f} s" for w in row["waits"])
        waits = waits or (f"ended with {row['ended']}" if row.get("ended") else "")
        colour = colours[row["state"]]
        table.add_row(
            row["name"],
            f"[{colour}]{row['state']}[/]",
            str(row["pid"] or ""),
            str(row["restarts"]),
            row["url"],
            escape(visible(waits)),
        )
    console = Console()
    console.print(table)
    for line in told(rows):
        console.print(escape(line), highlight=False)


def told(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each run of which a service tells what it reckons with."""
    return [visible(f"{row['name']}, {about}: {what}") for row in rows for about, what in row["tells"].items()]


def show_logs(state: Path, service: str | None, follow: bool, lines: int) -> None:
    """The last lines of each log, then, with `follow`, what is added."""
    folder = state / "logs"
    paths = [folder / f"{service}.log"] if service else sorted(folder.glob("*.log"))
    missing = [p for p in paths if not p.exists()]
    if missing or not paths:
        known = ", ".join(sorted(p.stem for p in folder.glob("*.log"))) or "none yet"
        raise SystemExit(f"no log of {service or 'any service'} in {folder}; there are: {known}")
    positions = {}
    for path in paths:
        with path.open("rb") as file:
            text = file.read()
            positions[path] = len(text)
        for line in text.decode(errors="replace").splitlines()[-lines:] if lines else []:
            print(f"{path.stem:>10} | {line}")
    while follow:
        for path in paths:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < positions[path]:
                    positions[path] = 0  # it has begun anew
                file.seek(positions[path])
                added = file.read()
            positions[path] += len(added)
            for line in added.decode(errors="replace").splitlines():
                print(f"{path.stem:>10} | {line}", flush=True)
        time.sleep(0.3)
