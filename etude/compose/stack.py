"""The platform's containers: which is not well, since when, why by its own words, and what to do."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from etude.compose.docker import ask, last_line, plain
from etude.finding import Finding

PROJECT, SERVICE, ONE_OFF = (f"com.docker.compose.{name}" for name in ("project", "service", "oneoff"))
STAYS = ("always", "unless-stopped")  # restart policies
UP = ("running", "restarting", "paused")
TRAINERS, ENGINES = ("trainer", "trainer-gpu"), ("inference", "inference-gpu")  # of one profile or the other
SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
TAIL = 20
PAGE = "docs/operations.md, When it does not start"
# What a log or a health check says → what to do. The rest is in its log.
KNOWN = (
    ("sandbox_unavailable", "the host keeps user namespaces from containers: docs/sandboxes.md, In containers"),
    ("password authentication failed", "the password in .env is not the one that PostgreSQL was first started with"),
    ("already allocated", "a published port is in use: the line about ports says by whom"),
    ("address already in use", "a published port is in use: the line about ports says by whom"),
    ("no space left on device", "make room where Docker keeps its data: docs/operations.md, What grows"),
)


def containers(folder: Path, project: str) -> list[dict[str, Any]]:
    """What `docker inspect` says of each of the project's, but for those of `docker compose run`."""
    listed = ask(folder, "ps", "--all", "--quiet", "--filter", f"label={PROJECT}={project}").out.split()
    if not listed:
        return []
    try:
        found = json.loads(ask(folder, "inspect", *listed).out or "[]")  # one that has just gone is left out
    except ValueError:
        return []
    return [one for one in found if _labels(one).get(ONE_OFF, "False") == "False"]


def names(found: Sequence[dict[str, Any]]) -> set[str]:
    return {one["Name"].lstrip("/") for one in found}


def running(found: Sequence[dict[str, Any]]) -> bool:
    return any(one["State"]["Status"] in UP for one in found)


def check(
    folder: Path, services: Mapping[str, dict[str, Any]], found: Sequence[dict[str, Any]], now: float
) -> list[Finding]:
    """`services`: those that `docker compose up` would start."""
    if not found:
        return [Finding("platform", True, "not started")]
    if not running(found) and not any(one["State"]["Status"] == "created" for one in found):
        return [Finding("platform", True, f"{len(found)} containers, all stopped")]
    bad = [
        _finding(folder, one, said)
        for one in sorted(found, key=lambda one: one["Name"])
        if not _done(one, services) and (said := trouble(one["State"], one.get("RestartCount", 0), now))
    ]
    bad += left_over(services, found)
    there = {_labels(one).get(SERVICE) for one in found}
    for service, asked in services.items():
        if service not in there and asked.get("scale") != 0:
            bad.append(
                Finding(service, False, "has no container, others have", f"docker compose up -d --wait {service}")
            )
    return bad or [Finding("platform", True, f"{len(found)} containers, all well")]


def left_over(services: Mapping[str, dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[Finding]:
    """Trainers of a profile that is no longer asked for: docker compose stops nothing whose profile was taken away, and two
    trainers take the run from each other. An engine beside the other kind may be meant, and is only named with its trainer."""
    up = {_labels(one).get(SERVICE, "") for one in found if one["State"]["Status"] in UP}
    old = [name for name in TRAINERS if name in up and name not in services]
    engines = [name for name in ENGINES if name in up and name not in services]
    way_out = f"docker compose stop {' '.join(old + engines)}"
    return [Finding(name, False, "runs, and COMPOSE_PROFILES does not ask for it", way_out) for name in old]


def _done(one: dict[str, Any], services: Mapping[str, dict[str, Any]]) -> bool:
    """It had one thing to do, and did it; or nobody asks for it any more, and it was stopped. What shall stay and has drained
    ended with 0 as well: its restart policy tells."""
    if one["State"]["Status"] != "exited":
        return False
    policy = one["HostConfig"]["RestartPolicy"]["Name"]
    unasked = _labels(one).get(SERVICE) not in services and policy in STAYS  # Docker ends none of these by itself
    return unasked or (one["State"]["ExitCode"] == 0 and policy not in STAYS)


def trouble(state: dict[str, Any], restarts: int, now: float) -> str:
    """What is wrong and since when; empty where nothing is."""
    status, health = state["Status"], state.get("Health") or {}
    if status == "created":
        return f"was never started: {plain(state.get('Error') or '') or 'what it waits for was not well'}"
    if status != "running":
        memory = (
            ", killed for memory: its mem_limit is too low, or the machine's memory" if state.get("OOMKilled") else ""
        )
        again = f" again and again ({restarts} times)" if status == "restarting" else ""
        return f"{status}{again}, exit code {state['ExitCode']}{memory}, {since(state['FinishedAt'], now)}"
    if health.get("Status") not in ("starting", "unhealthy"):
        return ""
    log = health.get("Log") or []
    failed = [look for look in log[-max(1, health.get("FailingStreak", 0)) :] if look["ExitCode"]]
    begin = state["StartedAt"] if health["Status"] == "starting" or not failed else failed[0]["Start"]
    at_least = "at least " if failed and health.get("FailingStreak", 0) > len(log) else ""
    says = f"; its check says: {last_line(failed[-1]['Output'])}" if failed else ""
    return f"{health['Status']}, {at_least}{since(begin, now)}{says}"


def since(text: str, now: float) -> str:
    """`text`: a time as Docker writes it, with nanoseconds and a zone."""
    match = re.match(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)$", text)
    if not match or match[1].startswith("0001"):
        return "since an unknown time"
    zone = "+00:00" if match[3] == "Z" else match[3]
    seconds = max(0.0, now - datetime.fromisoformat(f"{match[1]}T{match[2]}{zone}").timestamp())
    length, unit = next(((span, unit) for span, unit in SPANS if seconds >= span), SPANS[-1])
    return f"for {seconds // length:.0f} {unit} (since {match[1]} {match[2]} {'UTC' if zone == '+00:00' else zone})"


def _labels(one: dict[str, Any]) -> dict[str, str]:
    return (one.get("Config") or {}).get("Labels") or {}


def _finding(folder: Path, one: dict[str, Any], said: str) -> Finding:
    name = one["Name"].lstrip("/")
    service = _labels(one).get(SERVICE, name)
    log = "" if one["State"]["Status"] == "created" else _log(folder, name)
    known = next((way for words, way in KNOWN if words in f"{log}\n{said}".lower()), "")
    way_out = "; ".join(filter(None, (known, f"docker compose logs --tail 50 {service}; {PAGE}")))
    last = last_line(log)
    return Finding(name, False, f"{said}; its log ends: {last}" if last else said, way_out)


def _log(folder: Path, name: str) -> str:
    """Both of its streams, as they were written: `docker logs` keeps them apart."""
    try:
        done = subprocess.run(
            ["docker", "logs", "--tail", str(TAIL), name],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=30,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout
