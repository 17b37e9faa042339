"""Sets up everything that `make` needs, by itself, on a machine with Python, make and a package manager.

Standard library only: it runs before anything is installed. Makes `.venv` (of this Python if it is 3.11 or 3.12, else of one
that uv finds or fetches), installs the pinned packages (a CPU build of torch when there is no GPU and such a build can be
had) and, by apt when root, what the system lacks. What the machine itself lacks is told before anything is downloaded. A stamp
makes second runs instant.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a file
# Python 3.6 must be able to parse this file: no `:=`, no postponed annotations. Its imports may need a newer one.
if sys.version_info < (3, 8):  # noqa: UP036
    sys.exit(
        f"setup: found Python {sys.version.split()[0]}; needed: 3.8 or newer to begin with (the environment itself gets 3.11 or "
        "3.12). Install one, then name it: make PYTHON=python3.12 …"
    )

from etude import room  # noqa: E402  (standard library only, too)

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLD = ROOT / ".venv.old"
UV = "0.13.9"
STAMP = VENV / ".etude-stamp"
EXTRAS = "all,test"
SUPPORTED = ((3, 11), (3, 12))
DISK_GIB = 7.5  # README: 8 GB, of which packages take up to 5
AGAIN_GIB = 1.0  # where the packages are there and some change
ANYWAY = "SETUP_ANYWAY"


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"setup: {text}")


def fingerprint() -> str:
    digest = hashlib.sha256(f"{sys.version_info[:2]}{EXTRAS}".encode())
    for path in (ROOT / "pyproject.toml", ROOT / "constraints" / "linux.txt", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def at_home() -> bool:
    """Whether the environment lies where it was made: its commands name that place, behind `#!` or, where it is long or has
    spaces, in quotes."""
    command = VENV / "bin" / "etude"
    if VENV.is_symlink() or not command.exists():
        return True
    begins = command.read_bytes()[:8192]
    return any(f"{mark}{VENV}/bin/python".encode() in begins for mark in ("#!", '"', "'"))


def check_machine() -> None:
    if sys.platform != "linux":
        fail(
            f"found {sys.platform}; Étude runs on Linux. On Windows use WSL2, on macOS a Linux virtual machine or Docker."
        )


def lacks_room(fresh: bool) -> "list[str]":
    """What the machine has too little of, with the way out. `fresh`: nothing is installed yet."""
    lacks = []
    wanted = DISK_GIB if fresh else AGAIN_GIB
    folder, free = room.disk_gib(ROOT)
    if free < wanted:
        lacks.append(f"disk: {free:.1f} GiB free below {folder}; free {wanted:g} GiB, or clone where there is room")
    memory = room.memory_gib()
    if fresh and memory is not None and memory < room.MEMORY_GIB:
        lacks.append(
            f"memory: {memory:.1f} GiB free; free at least {room.MEMORY_GIB:g} GiB (in a container: raise its limit)"
        )
    return lacks


def lacks_namespaces() -> "list[str]":
    bwrap = shutil.which("bwrap")
    if not bwrap or os.environ.get("ETUDE_SANDBOX") == "process":
        return []
    reason = room.without_namespaces(bwrap)
    return [f"sandbox: {reason}; {room.NAMESPACES}"] if reason else []


def require(lacks: "list[str]") -> None:
    """Before gigabytes are downloaded: the demo would not start on this machine."""
    if lacks and not os.environ.get(ANYWAY):
        lines = "".join(f"\n  {line}" for line in lacks)
        fail(f"something is missing, and nothing was downloaded:{lines}\n  To set up all the same: {ANYWAY}=1 make …")


def interpreter(version: "tuple[int, int]") -> str:
    """What uv makes the environment of: this Python, whose version is given, or any that will do."""
    return sys.executable if version in SUPPORTED else f">={_dotted(SUPPORTED[0])},<={_dotted(SUPPORTED[-1])}.99"


def _dotted(version: "tuple[int, int]") -> str:
    return ".".join(map(str, version))


def lacking() -> "dict[str, str]":
    """What the system lacks -> the Debian package that brings it."""
    found = {
        "bwrap": shutil.which("bwrap") or os.environ.get("ETUDE_SANDBOX") == "process",
        "python3 -m venv": importlib.util.find_spec("ensurepip") or shutil.which("uv"),
    }
    packages = {"bwrap": "bubblewrap", "python3 -m venv": "python3-venv"}
    return {what: packages[what] for what, there in found.items() if not there}


def system_packages() -> None:
    missing = lacking()
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


def uv() -> "list[str]":
    """A uv to install with: the machine's, or one of our own beside the environment."""
    found = shutil.which("uv")
    if found:
        return [found]
    own = ROOT / ".cache" / f"uv-{UV}"
    if not (own / "bin" / "uv").exists():
        say("installing uv")
        subprocess.run([sys.executable, "-m", "venv", str(own)], check=True)
        subprocess.run(
            [str(own / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", f"uv=={UV}"], check=True
        )
    return [str(own / "bin" / "uv")]


def has_gpu() -> bool:
    return (
        bool(shutil.which("nvidia-smi")) and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


def install() -> None:
    tool = uv()
    if not PYTHON.exists():
        say("making .venv")
        if subprocess.run([*tool, "venv", "-q", "-p", interpreter(sys.version_info[:2]), str(VENV)]).returncode:
            fail(
                f"no environment could be made; the lines above say why. This is Python {sys.version.split()[0]}; 3.11 or "
                "3.12 is needed: install one, then make PYTHON=python3.12 …"
            )
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
    if STAMP.exists() and STAMP.read_text() == fingerprint() and at_home():
        return
    moved = not at_home()
    fresh = moved or not PYTHON.exists()
    require(lacks_room(fresh))
    system_packages()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if "UV_CACHE_DIR" not in os.environ and (cache.startswith("~") or not room.may_write(Path(cache, "uv"))):
        os.environ["UV_CACHE_DIR"] = str(ROOT / ".cache" / "uv")
    if fresh:
        require(lacks_namespaces())
    if moved:
        say(f"{VENV} was made in another folder; making it anew")
        VENV.rename(OLD)
    install()
    shutil.rmtree(OLD, ignore_errors=True)
    STAMP.write_text(fingerprint())
    say("done")


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python3 infra/setup.py", description=(__doc__ or "").split("\n")[0]).parse_args()
    main()
