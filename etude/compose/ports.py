"""The ports that docker compose publishes: free, this platform's own, or in use by whom."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.compose.docker import ask
from etude.finding import Finding

LISTENS = "0A"  # state of a socket in /proc/net/tcp


def published(plan: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(service, address, port) of what has one fixed port on this machine."""
    return [
        (name, port.get("host_ip") or "0.0.0.0", int(port["published"]))
        for name, service in plan["services"].items()
        for port in service.get("ports") or []
        if str(port.get("published", "")).isdigit() and port.get("protocol", "tcp") == "tcp"
    ]


def check(folder: Path, plan: dict[str, Any], own: set[str]) -> list[Finding]:
    """`own`: names of this platform's containers."""
    wanted = published(plan)
    holders = containers(folder)
    found = []
    for service, address, port in wanted:
        variable = service.removeprefix("inference-").upper().replace("-", "_")  # as docker-compose.yml names them
        another = f"another port: ETUDE_{variable}_PORT in .env"
        twice = [name for name, _, same in wanted if same == port and name != service]
        if twice:
            found.append(Finding(f"port {port}", False, f"asked for by {service} and by {twice[0]}", another))
        elif who := _holder(address, port, holders, own):
            found.append(
                Finding(f"port {port}", False, f"{service} wants it; in use by {who}", f"end that, or {another}")
            )
    numbers = ", ".join(str(port) for _, _, port in wanted)
    return found or [Finding("ports", True, f"{numbers}: free, or this platform's own")]


def _holder(address: str, port: int, holders: dict[int, str], own: set[str]) -> str:
    """Empty where it is free or this platform's. A container's need not show as a listener (userland-proxy: false)."""
    if container := holders.get(port):
        return "" if container in own else f"container {container}"
    return process(port) if taken(address, port) else ""


def taken(address: str, port: int) -> bool:
    """Whether somebody listens there. What only root may bind is not taken by that: the engine is root."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was closed just now is no listener
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def containers(folder: Path) -> dict[int, str]:
    """Published port → the running container that has it."""
    found = {}
    for line in ask(folder, "ps", "--format", "{{.Names}}\t{{.Ports}}").out.splitlines():
        name, _, ports = line.partition("\t")
        found.update({int(port): name for port in re.findall(r":(\d+)->", ports)})
    return found


def process(port: int) -> str:
    """Who listens, as far as this person may see it."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(link.readlink()) in sockets for link in (directory / "fd").iterdir()):
                return f"{(directory / 'comm').read_text().strip()} (process {directory.name})"
        except OSError:
            continue  # it ended, or is another person's
    return f"a process that only root sees (sudo ss -ltnp 'sport = :{port}')"


def _listening(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            cells = row.split()
            if cells[3] == LISTENS and int(cells[1].rpartition(":")[2], 16) == port:
                yield cells[9]
