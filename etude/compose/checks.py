"""What docker compose would stumble over, in the order in which it would. Each line names what was found, what is allowed and
the way out."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from pathlib import Path
from typing import Any

from etude.compose import docker, ports, settings, stack
from etude.finding import GIB, Finding

ENGINE = (20, 10)  # the oldest that a run in compose was rehearsed on
COMPOSE = (2, 17)  # the first that knows `up --wait-timeout`, which `make rehearse` types
MEMORY_GIB = 4.0  # nine services hold about 3 GiB together, the idle servers another half
BUILD_GIB = 20.0  # images with torch for CUDA and what building them leaves behind: 16 GB
DATA_GIB = 5.0  # topics, objects and metrics of the first runs
INSTALL = (
    "https://docs.docker.com/engine/install/, or on Debian and Ubuntu: apt-get install docker.io docker-compose-v2"
)


def findings(folder: Path) -> list[Finding]:
    """Of the checkout in `folder`. What can only be asked once an earlier line is mended is left out."""
    if not docker.there():
        return [Finding("docker", False, "not on the PATH", f"install it: {INSTALL}"), settings.check(folder)]
    info, first = engine(folder)
    found = [first, compose(folder), settings.check(folder)]
    if not all(finding.ok for finding in found):
        return found
    plan, read = planned(folder)
    if plan is None:
        return [*found, read]
    there = stack.containers(folder, plan["name"])
    runs = stack.running(there)
    return [
        *found,
        read,
        cores(plan, info),
        memory(info, runs),
        disk(folder, plan, info),
        *ports.check(folder, plan, stack.names(there)),
        *stack.check(folder, plan["services"], there, time.time()),
    ]


def engine(folder: Path) -> tuple[dict[str, Any], Finding]:
    answer = docker.ask(folder, "info", "--format", "{{json .}}")
    try:
        info = json.loads(answer.out)
    except ValueError:
        info = {}
    version = info.get("ServerVersion", "")
    if not version:
        return {}, Finding("docker engine", False, f"does not answer: {answer.reason}", _reach(answer.reason))
    return info, Finding(
        "docker engine",
        _recent(version, ENGINE),
        f"{version}; allowed: {_dotted(ENGINE)} or newer",
        f"install a newer one: {INSTALL}",
    )


def _reach(reason: str) -> str:
    if "permission denied" in reason.lower():
        return "sudo usermod -aG docker $USER and sign in again (whoever may use Docker is as good as root), or call it with sudo"
    if host := os.environ.get("DOCKER_HOST"):
        return f"DOCKER_HOST says {host}: start the engine there, or unset it"
    return "sudo systemctl start docker; `docker context ls` says which engine is meant"


def compose(folder: Path) -> Finding:
    answer = docker.ask(folder, "compose", "version", "--short")
    version = answer.out.strip()
    way_out = f"install compose v2 as docker's plugin: {INSTALL}"
    if answer.code or not version:
        old = "; found docker-compose, which is version 1" if shutil.which("docker-compose") else ""
        return Finding("docker compose", False, f"docker has no command `compose`{old}", way_out)
    return Finding(
        "docker compose", _recent(version, COMPOSE), f"{version}; allowed: {_dotted(COMPOSE)} or newer", way_out
    )


def planned(folder: Path) -> tuple[dict[str, Any] | None, Finding]:
    """What `docker compose up` would start, by compose itself. It holds secrets: no part of it is printed."""
    answer = docker.ask(folder, "compose", "config", "--format", "json")
    try:
        plan = json.loads(answer.out) if answer.code == 0 else None
    except ValueError:
        plan = None
    if not plan or not plan.get("services"):
        return None, Finding(
            "compose files",
            False,
            f"refused: {answer.reason}",
            "mend what it names; `docker compose config -q` tries again",
        )
    trainers = [name for name in stack.TRAINERS if name in plan["services"]]
    if len(trainers) != 1:
        return plan, Finding(
            "profile",
            False,
            f"COMPOSE_PROFILES starts {' and '.join(trainers) or 'no trainer'}; allowed: exactly one",
            "COMPOSE_PROFILES=cpu or COMPOSE_PROFILES=gpu in .env",
        )
    return plan, Finding("compose files", True, f"{len(plan['services'])} services, {trainers[0]} among them")


def cores(plan: dict[str, Any], info: dict[str, Any]) -> Finding:
    """The engine refuses a container that asks for more than the machine has."""
    there = info.get("NCPU", 0)
    wanted = max(float(service.get("cpus") or 0) for service in plan["services"].values())
    ok = not there or wanted <= there
    return Finding("cores", ok, f"{there}; a service asks for {wanted:g}", "lower `cpus` in an override file")


def memory(info: dict[str, Any], runs: bool) -> Finding:
    """What is free where the engine runs on this machine, else what it has in all."""
    gib, word = info.get("MemTotal", 0) / GIB, "in all"
    if info.get("KernelVersion") == platform.release() and (free := _available()):
        gib, word = free / GIB, "free"
    ok = runs or gib >= MEMORY_GIB
    found = f"{gib:.1f} GiB {word}" + ("; the platform runs" if runs else f"; wanted: {MEMORY_GIB:g}")
    return Finding("memory", ok, found, "end what needs it, or give Docker's virtual machine more (docs/operations.md)")


def _available() -> int:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def disk(folder: Path, plan: dict[str, Any], info: dict[str, Any]) -> Finding:
    """Where the engine keeps images and volumes."""
    root = info.get("DockerRootDir", "")
    what = f"disk below {root}"
    try:
        gib = shutil.disk_usage(root).free / GIB
    except OSError:
        return Finding(what, True, "unknown: not on this machine, or not for you to see")
    images = sorted({service["image"] for service in plan["services"].values() if service.get("image")})
    built = docker.ask(folder, "image", "inspect", "--format", "{{.Id}}", *images).code == 0
    wanted, why = (DATA_GIB, "for data") if built else (BUILD_GIB, "to build or pull the images too")
    return Finding(
        what,
        gib >= wanted,
        f"{gib:.1f} GiB free; wanted: {wanted:g}, {why}",
        "`docker system df` says what takes it, `docker image prune` removes images without a name; or move it: data-root in "
        "/etc/docker/daemon.json",
    )


def _recent(version: str, least: tuple[int, int]) -> bool:
    """One that does not read as a version (a development build) is not judged."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return not match or (int(match[1]), int(match[2])) >= least


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
