"""Labels on everything that Étude makes in an engine, and the decision which of it may be removed.

Invariant: a thing without our label is never touched, and neither is one whose owner may still live.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KIND, DIGEST, RUN = "etude.kind", "etude.digest", "etude.run"
OWNER, DEADLINE = "etude.owner", "etude.deadline"
KINDS = ("sandbox", "helper", "base", "files")
CACHE_S = 7 * 86400.0  # images and volumes that many sandboxes share; made again where somebody needs them later


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, so named that a reused id is not taken for it. `machine`: one boot of one PID namespace."""

    machine: str
    pid: int
    started: str  # in ticks since the boot, as /proc says

    def __str__(self) -> str:
        return f"{self.machine}/{self.pid}/{self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Return the owner that a label names, or None where it names none."""
        machine, _, rest = text.rpartition("/")[0].rpartition("/")
        started = text.rpartition("/")[2]
        return cls(machine, int(rest), started) if machine and rest.isdecimal() else None


def this_process() -> Owner:
    return Owner(_machine(), os.getpid(), _started(os.getpid()) or "")


def labels(kind: str, *, seconds: float, run: str = "", digest: str = "") -> dict[str, str]:
    """Return the labels of a new thing that this process owns. `seconds`: until anybody may remove it."""
    made = {KIND: kind, OWNER: str(this_process()), DEADLINE: str(int(time.time() + seconds))}
    return {**made, **({RUN: run} if run else {}), **({DIGEST: digest} if digest else {})}


def name(kind: str) -> str:
    """Return a name that no other process chooses."""
    return f"etude-{kind}-{secrets.token_hex(8)}"


def expired(found: Mapping[str, str], now: float) -> bool:
    """Whether a thing with these labels may be removed: its owner is dead or its deadline has passed.

    Bases and files are caches that outlive their owner, so only their deadline counts. An owner on another machine, or in
    another PID namespace, cannot be looked up: there, too, only the deadline counts.
    """
    kind = found.get(KIND, "")
    if kind not in KINDS:
        return False
    deadline = found.get(DEADLINE, "")
    if deadline.isdecimal() and int(deadline) < now:
        return True
    owner = Owner.parse(found.get(OWNER, ""))
    if kind in ("base", "files") or owner is None or owner.machine != _machine():
        return False
    return _started(owner.pid) != owner.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        boot, namespace = "", ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def _started(pid: int) -> str | None:
    """Return when a process started, or None if there is none with this id, or only one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
