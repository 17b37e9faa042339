"""Makes a Debian root file system with mmdebstrap, as root or as an ordinary user. Gives a tar: nothing of it lies on the host."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.sandbox.bases.rootfs import TIME
from shared.sandbox.bases.store import BaseRefused

PYTHONS = {"bullseye": "3.9", "bookworm": "3.11", "trixie": "3.13"}  # of each suite
_SUITE = re.compile(r"[a-z][a-z0-9-]{0,40}\Z")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{1,100}\Z")
_TIME_S = 3600.0
_STAGES = 14  # lines that mmdebstrap says, about
_LINES = 40  # of its output that are kept for an error
NO_TOOL = (
    "needs the program mmdebstrap, which is not installed here: apt install mmdebstrap (an ordinary user also needs uidmap "
    "or fakechroot); or take --from-image or --from-folder"
)


def with_python(suite: str, version: str, packages: Sequence[str]) -> list[str] | None:
    """Return the packages that also give this Python, or None where the suite has another one."""
    if PYTHONS.get(suite) != version:
        return None
    return [*packages, *(name for name in ("python3", "python3-pip", "python3-venv") if name not in packages)]


def build(
    suite: str, packages: Sequence[str], mirror: str, into: Path, progress: Callable[[str, int, int], None]
) -> None:
    """Write the tar of a root file system to `into`. `mirror`: empty: Debian's own. Raises BaseRefused."""
    if not _SUITE.match(suite):
        raise BaseRefused(f"--debian: found {suite!r:.80}; allowed: the name of a suite: {', '.join(PYTHONS)}, …")
    if wrong := [name for name in packages if not _PACKAGE.match(name)]:
        raise BaseRefused(f"--packages: found {wrong[0]!r:.80}; allowed: names of Debian packages, joined by commas")
    if mirror.startswith("-"):
        raise BaseRefused(f"--mirror: found {mirror!r:.80}; allowed: an address, or a line of sources.list")
    program = shutil.which("mmdebstrap")
    if program is None:
        raise BaseRefused(f"--debian {NO_TOOL}")
    command = [program, "--variant=minbase", "--format=tar", '--aptopt=APT::Install-Recommends "false"']
    command += ["--dpkgopt=path-exclude=/usr/share/doc/*"]
    command += ["--dpkgopt=path-include=/usr/share/doc/*/copyright"]
    command += [f"--include={','.join(packages)}"] if packages else []
    command += [suite, str(into), *([mirror] if mirror else [])]
    _run(command, progress)


def without_ours() -> dict[str, str]:
    """Return the environment without our settings: a package's scripts need no key of the object store."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETUDE_")}


def _run(command: list[str], progress: Callable[[str, int, int], None]) -> None:
    # SOURCE_DATE_EPOCH: the same packages give the same bytes. PATH: an ordinary user's may lack what dpkg asks for.
    path = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    environment = {
        **without_ours(),
        "SOURCE_DATE_EPOCH": str(TIME),
        "LC_ALL": "C.UTF-8",
        "PATH": path,
    }
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    assert process.stderr is not None
    out_of_time = threading.Event()

    def end() -> None:
        out_of_time.set()
        _end(process)

    late = threading.Timer(_TIME_S, end)
    late.daemon = True
    late.start()
    said: list[str] = []
    stage = 0
    try:
        for line in process.stderr:
            said = [*said[-_LINES:], line.rstrip()]
            if line.startswith("I: "):
                stage += 1
                progress(f"mmdebstrap: {line[3:].strip()}", min(stage, _STAGES), _STAGES)
        code = process.wait()
    finally:
        late.cancel()
        _end(process)
    if out_of_time.is_set():
        raise BaseRefused(f"mmdebstrap took more than {_TIME_S:g} s; is the mirror slow? --mirror names another")
    if code:
        lines = [line for line in said if line.startswith(("E: ", "W: "))] or said
        raise BaseRefused(f"mmdebstrap ended with code {code}: {' / '.join(lines[-6:])[:1500] or 'it said nothing'}")


def _end(process: subprocess.Popen[str]) -> None:
    """Ask it to end, which lets it remove what it made, and then end it. Its first process alone would wait for the others."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
