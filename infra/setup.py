"""Sets up everything that `make` needs, by itself, on a machine with Python >= 3.11, make and a package manager.

Standard library only: it runs before anything is installed. Makes `.venv`, installs the pinned packages (a CPU build of
torch when there is no GPU and such a build can be had) and bubblewrap by apt when root. A stamp makes second runs
instant.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".etude-stamp"
EXTRAS = "all,test"
SYSTEM = {"bwrap": "bubblewrap"}


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"setup: {text}")


def fingerprint() -> str:
    digest = hashlib.sha256(f"{sys.version_info[:2]}{EXTRAS}".encode())
    for path in (ROOT / "pyproject.toml", ROOT / "constraints" / "linux.txt", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_machine() -> None:
    if sys.platform != "linux":
        fail(f"found {sys.platform}; Étude runs on Linux. Use Docker, a virtual machine, or WSL2 on Windows.")
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        fail(f"found Python {sys.version.split()[0]}; 3.11 or 3.12 is needed: make PYTHON=python3.11 …")


def system_packages() -> None:
    missing = {tool: package for tool, package in SYSTEM.items() if not shutil.which(tool)}
    if not missing:
        return
    names = " ".join(missing.values())
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {names} by apt-get")
        quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
        subprocess.run(["apt-get", "update", "-qq"], check=False, **quiet)  # an old list may still do
        if subprocess.run(["apt-get", "install", "-y", "-qq", *missing.values()], check=False, **quiet).returncode == 0:
            return
    fail(f"{', '.join(missing)} not found. Install: {names} (e.g. sudo apt-get install {names}), then run make again.")


def uv() -> list[str]:
    """A uv to install with: the machine's, or one of our own beside the environment."""
    if found := shutil.which("uv"):
        return [found]
    own = ROOT / ".cache" / "uv-venv"
    if not (own / "bin" / "uv").exists():
        say("installing uv")
        subprocess.run([sys.executable, "-m", "venv", str(own)], check=True)
        subprocess.run([str(own / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", "uv"], check=True)
    return [str(own / "bin" / "uv")]


def has_gpu() -> bool:
    return (
        bool(shutil.which("nvidia-smi")) and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


def install() -> None:
    tool = uv()
    if not PYTHON.exists():
        say("making .venv")
        subprocess.run([*tool, "venv", "-q", "-p", sys.executable, str(VENV)], check=True)
    base = [*tool, "pip", "install", "-q", "-p", str(PYTHON), "-c", str(ROOT / "constraints" / "linux.txt")]
    target = ["-e", f"{ROOT}[{EXTRAS}]"]
    started = time.monotonic()
    if not has_gpu():
        say("installing packages (no GPU here: trying torch's CPU build first)")
        quick = {**os.environ, "UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": "30"}
        if subprocess.run([*base, "--torch-backend", "cpu", *target], env=quick, capture_output=True).returncode == 0:
            say(f"installed in {time.monotonic() - started:.0f} s")
            return
        say("no CPU build of torch can be had here; taking the ordinary one (about 5 GB)")
    else:
        say("installing packages")
    if subprocess.run([*base, *target]).returncode:
        fail("the packages could not be installed; the lines above say why.")
    say(f"installed in {time.monotonic() - started:.0f} s")


def main() -> None:
    check_machine()
    if STAMP.exists() and STAMP.read_text() == fingerprint():
        return
    system_packages()
    install()
    STAMP.write_text(fingerprint())
    say("done")


if __name__ == "__main__":
    main()
