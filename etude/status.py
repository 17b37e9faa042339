"""`etude status` and `etude logs`: what runs, and what it waits on."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from shared.settings import REFUSED


def _gone(url: str) -> bool:
    """Nobody has that name any more: a container that was killed and replaced leaves its file behind."""
    try:
        socket.getaddrinfo(urlsplit(url).hostname, None)
    except socket.gaierror:
        return True
    return False


def _get(url: str, timeout_s: float = 1.0) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:  # /readyz answers 503 with a body
        try:
            return json.load(error)
        except ValueError:
            return None
    except (OSError, ValueError):
        return None


def collect(state: Path) -> list[dict[str, Any]]:
    """One row per service: {name, pid, url, state: ready|waiting|starting|silent|refused|down, waits: [...], restarts}.
    refused: its settings are bad, and it is not started again."""
    try:
        supervised = json.loads((state / "supervisor.json").read_text())["services"]
    except (OSError, ValueError, KeyError):
        supervised = {}
    endpoints = {}
    for path in sorted((state / "run").glob("*.json")):
        try:
            endpoints[path.stem] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # being written right now
    rows = []
    for name in list(supervised) + [n for n in endpoints if n not in supervised]:
        child, endpoint = supervised.get(name, {}), endpoints.get(name)
        row: dict[str, Any] = {"name": name, "pid": child.get("pid"), "restarts": child.get("restarts", 0), "waits": []}
        row["url"] = endpoint["url"] if endpoint else ""
        if endpoint and (answer := _get(endpoint["url"] + "/readyz")) is not None:
            row["state"], row["waits"] = ("ready" if answer.get("ready") else "waiting"), answer.get("waits", [])
        elif endpoint and name not in supervised and _gone(endpoint["url"]):
            continue
        elif child.get("last_exit") == REFUSED:
            row["state"] = "refused"
        elif child.get("pid"):
            row["state"] = "silent" if endpoint else "starting"
        else:
            row["state"] = "down"
        rows.append(row)
    return rows


def show(state: Path, *, as_json: bool) -> None:
    rows = collect(state)
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print(f"{state}: nothing is running here. `etude up` starts the services, `etude demo` the demo.")
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
        colour = colours[row["state"]]
        table.add_row(
            row["name"], f"[{colour}]{row['state']}[/]", str(row["pid"] or ""), str(row["restarts"]), row["url"], waits
        )
    Console().print(table)


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
                file.seek(positions[path])
                added = file.read()
            positions[path] += len(added)
            for line in added.decode(errors="replace").splitlines():
                print(f"{path.stem:>10} | {line}", flush=True)
        time.sleep(0.3)
