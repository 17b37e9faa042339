"""`etude doctor`: can this machine run the demo, or the platform in docker compose, and if not, what is the way out.

Each check is a function that returns a `Finding`; whatever starts services runs the same checks before it writes anything.
Those of docker compose need no environment and have a room of their own (etude.compose).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from etude import room
from etude.finding import Finding
from etude.finding import report as told

DISK_GIB = 2.0  # pack, objects of a ten-minute run, logs
ELSEWHERE = "give another folder with --state"
BASE_PORT = 8700  # ports of `etude up` and of the demo count from here


def system() -> Finding:
    ok = sys.platform == "linux"
    return Finding(
        "Linux",
        ok,
        platform.platform(),
        "" if ok else "run Étude in Docker, in a Linux virtual machine, or on Windows in WSL2",
    )


def python() -> Finding:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding(
        "Python 3.11 or 3.12",
        ok,
        platform.python_version(),
        "" if ok else "make the environment with python3.11 or python3.12",
    )


def packages() -> Finding:
    needed = ("torch", "deepspeed", "celery", "sqlalchemy", "tokenizers", "aiohttp")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return Finding(
        "packages", not missing, "all there" if not missing else f"missing: {', '.join(missing)}", "make setup"
    )


def sandbox() -> Finding:
    """Of functions. With ETUDE_SANDBOX=docker or kubernetes they need bubblewrap as well."""
    if os.environ.get("ETUDE_SANDBOX") == "process":
        return Finding(
            "sandbox", True, "bare processes, by your explicit ETUDE_SANDBOX=process: candidate code is NOT isolated"
        )
    bwrap = shutil.which("bwrap")
    if not bwrap:
        return Finding(
            "sandbox",
            False,
            "bubblewrap (bwrap) is not installed",
            "apt-get install bubblewrap, or your system's equal",
        )
    if reason := room.without_namespaces(bwrap):
        return Finding("sandbox", False, reason, room.NAMESPACES)
    if reason := room.without_proc(bwrap):
        return Finding("sandbox", True, f"{bwrap}, for functions alone; commands of repositories are refused: {reason}")
    return Finding("sandbox", True, bwrap)


def agents() -> Finding:
    """Open one of the sandboxes in which agents work on repositories. Say which adapter that is, how it limits memory, and what
    it lacks."""
    from shared.sandbox import SandboxUnavailable, open_sandboxes
    from shared.sandbox.contract import Base, Capability, Limits
    from shared.sandbox.pods.objects import Cluster

    setting = os.environ.get("ETUDE_SANDBOX") or "bubblewrap"
    kind = setting if setting in ("docker", "kubernetes") else "bubblewrap"
    image = os.environ.get("ETUDE_SANDBOX_IMAGE", "")
    cluster = Cluster(
        os.environ.get("ETUDE_SANDBOX_NAMESPACE") or Cluster().namespace,
        os.environ.get("ETUDE_SANDBOX_LOADER", ""),
        os.environ.get("ETUDE_SANDBOX_RUNTIME", ""),
    )
    adapter = open_sandboxes(kind, bases=lambda name: Path(name), cluster=cluster)

    async def tried() -> str:
        try:
            begins = Base("" if kind == "bubblewrap" else image)
            session = await (await adapter.open(begins, Limits(memory_mb=256, seconds=60.0))).session()
            done = await session.run("echo works", time_s=30.0)
            return "" if done.stdout == b"works\n" else f"a command gave {done.exit_code}: {done.stderr[-200:]!r}"
        except (SandboxUnavailable, ValueError, OSError) as error:
            return str(error)
        finally:
            await adapter.close()

    what = "sandboxes of agents"
    if wrong := asyncio.run(tried()):
        if setting == "process":
            return Finding(what, True, f"none, so no attempt at a repository runs here: {wrong}")
        way = (
            f"{room.NAMESPACES}; in a container also its /proc unmasked" if kind == "bubblewrap" else "as the text says"
        )
        return Finding(what, False, f"{kind}: {wrong}", way)
    lacking = {
        Capability.own_rootfs: "root file systems of their own (needs Linux 5.11, as root 5.19)",
        Capability.network: "network" if kind == "kubernetes" else "network by policy (pip install 'etude[egress]')",
    }
    missing = [text for name, text in lacking.items() if name not in adapter.capabilities]
    without = f"; without {' and '.join(missing)}" if missing else ""
    return Finding(what, True, f"{kind}, memory by {adapter.memory_by}{without}")


def memory() -> Finding:
    gib = room.memory_gib()
    if gib is None:
        return Finding("memory", True, "unknown")
    return Finding(
        "memory",
        gib >= room.MEMORY_GIB,
        f"{gib:.1f} GiB free",
        "" if gib >= room.MEMORY_GIB else f"free at least {room.MEMORY_GIB:g} GiB (in a container: raise its limit)",
    )


def disk(state: Path, elsewhere: str = ELSEWHERE) -> Finding:
    folder, gib = room.disk_gib(state)
    return Finding(
        f"disk below {folder}",
        gib >= DISK_GIB,
        f"{gib:.1f} GiB free",
        "" if gib >= DISK_GIB else f"free {DISK_GIB:g} GiB, or {elsewhere}",
    )


def writable(state: Path, elsewhere: str = ELSEWHERE) -> Finding:
    """Asked of the folder itself, or of the nearest one above it that is there."""
    ok = room.may_write(state)
    return Finding(
        f"folder {room.nearest(state)}", ok, "can be written" if ok else "cannot be written", "" if ok else elsewhere
    )


def cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return Finding("cores", True, f"{count}" + ("" if count >= 2 else "; the demo wants two: it will be slow"))


def settings() -> Finding:
    """Of every service, and of this command."""
    checked = subprocess.run([sys.executable, "-m", "services", "--check"], capture_output=True, text=True)
    ok = checked.returncode == 0
    found = "all are known" if ok else checked.stderr.strip().removeprefix("setting ")
    return Finding("settings", ok, found, "" if ok else "as each line says")


def servers(state: Path) -> list[Finding]:
    """What the settings name and is not embedded."""
    from etude import reach
    from shared.settings import ServiceSettings, read

    answers = reach.ask(read(ServiceSettings, state=state))
    return [
        Finding(what, ok, words if ok else "not usable", "" if ok else words) for what, (ok, words) in answers.items()
    ]


def ports() -> Finding:
    """The demo's, unless they are a demo's that runs now: `etude status` knows those."""
    from etude.supervisor import default_specs, taken_ports

    specs = default_specs(BASE_PORT)
    taken = taken_ports(specs)
    return Finding(
        f"ports {BASE_PORT} to {BASE_PORT + len(specs) - 1}",
        not taken,
        "free" if not taken else f"in use: {', '.join(map(str, taken))}",
        "end what uses them (`etude status`, `etude down`); `etude up --base-port N` takes others",
    )


def essentials(state: Path, elsewhere: str = ELSEWHERE) -> list[Finding]:
    """What every command that starts services needs. `elsewhere`: how another folder than `state` is given."""
    folder = (lambda: disk(state, elsewhere), lambda: writable(state, elsewhere))
    checks: list[Callable[[], Finding]] = [system, python, packages, sandbox, memory, *folder]
    found = [check() for check in checks]
    return [*found, settings()] if all(finding.ok for finding in found[:3]) else found  # it needs what those look for


def findings(state: Path) -> list[Finding]:
    """What `etude doctor` looks at."""
    found = [*essentials(state), cores()]
    if not found[0].ok:  # what the others need cannot be imported elsewhere
        return found
    good = all(finding.ok for finding in found if finding.what == "settings")
    return [*found, agents(), ports(), *(servers(state) if good else [])]


def report(state: Path) -> int:
    """Prints a line per check; 1 if one failed."""
    return told(findings(state), "This machine can run the demo.")


def report_compose(folder: Path) -> int:
    """The same of docker compose in the checkout `folder`."""
    from etude.compose.checks import findings as of_compose

    return told(of_compose(folder), "docker compose has all it needs.")
