"""The real SGLang on a CPU, in an environment of its own: what the tests hold our engine and our SGLang service against.

    python -m infra.sglang_cpu     # installs it below .cache/sglang; prints its interpreter

`README.md` beside this says what is in it and what its traps are. Never what users serve with.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

from infra.setup import uv

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENV = ROOT / ".cache" / "sglang"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".etude-stamp"
LOADED = """import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.managers.detokenizer_manager
import sglang.srt.models.registry"""  # what a server imports


class CannotInstall(RuntimeError):
    """The text says what is missing."""


def fingerprint() -> str:
    """Of everything that the environment is made from."""
    digest = hashlib.sha256(str(sys.version_info[:2]).encode())
    for path in sorted([HERE / "requirements.txt", HERE / "pyproject.toml", *(HERE / "sgl_kernel").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def python() -> Path | None:
    """The interpreter of the environment; None while it is not installed as these files say."""
    return PYTHON if STAMP.exists() and STAMP.read_text() == fingerprint() else None


def install() -> Path:
    """Returns the interpreter. Nothing happens where it is there already. Raises CannotInstall."""
    if (found := python()) is not None:
        return found
    started, tool = time.monotonic(), uv()
    if not PYTHON.exists():
        _run([*tool, "venv", "-q", "-p", sys.executable, str(VENV)], "no environment can be made")
    into = [*tool, "pip", "install", "-q", "-p", str(PYTHON), "--no-deps"]
    # The list is complete; SGLang's own would bring kernels for GPUs, one of which has the stand-in's name.
    _run([*into, "-r", str(HERE / "requirements.txt")], "its packages cannot be had")
    _run([*into, "--reinstall-package", "sglang-cpu", str(HERE)], "the stand-in cannot be installed")
    for left in (HERE / "build", *HERE.glob("*.egg-info")):
        shutil.rmtree(left, ignore_errors=True)
    # A start is nearly all imports: with bytecode it takes half as long. Compiling the whole environment takes twice as long.
    subprocess.run([str(PYTHON), "-c", LOADED], check=False, capture_output=True)
    STAMP.write_text(fingerprint())
    print(f"sglang_cpu: installed in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return PYTHON


def _run(arguments: list[str], otherwise: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise CannotInstall(f"SGLang on the CPU: {otherwise}: {done.stderr.strip()[-500:]}")
