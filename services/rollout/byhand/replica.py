"""An embedded engine of one's own: a process that serves a checkpoint for as long as an attempt takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from shared.process import end_with
from shared.settings import embedded

NAME = "by-hand"
START_S = 300.0  # a large checkpoint is read from a slow disk
LOOK_EVERY_S = 0.1
GRACE_S = 10.0
ROWS = 2  # sessions whose keys and values are held: one attempt has one
LAST_LINES = 5  # of the log, in an error


class NotStarted(Exception):
    """The engine did not come up; the text holds its last words."""


@asynccontextmanager
async def started(checkpoint: Path) -> AsyncIterator[str]:
    """Serve the checkpoint on a free port and yield the URL. The engine's process ends with the block, or with this process.
    Raises NotStarted."""
    with tempfile.TemporaryDirectory(prefix="etude-by-hand-") as name:
        state = Path(name)
        log = state / "engine.log"
        process = _start(checkpoint, state, log)
        try:
            yield await _url(process, state, log)
        finally:
            await asyncio.to_thread(_end, process)


def _start(checkpoint: Path, state: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "services.inference"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=_environment(checkpoint, state),
            preexec_fn=end_with(os.getpid()),
            process_group=0,
        )


def _environment(checkpoint: Path, state: Path) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "ETUDE_STATE": str(state),
        **{f"ETUDE_{name.upper()}": url for name, url in embedded(state).items() if name in ("bus", "objects")},
        "ETUDE_NAME": NAME,
        "ETUDE_LOGS": "json",
        "ETUDE_HOST": "127.0.0.1",
        "ETUDE_ADVERTISE": "",
        "ETUDE_PORT": "0",
        "ETUDE_ENGINE": "embedded",
        "ETUDE_POOL": "evaluation",
        "ETUDE_CHECKPOINT": str(checkpoint.resolve()),
        "ETUDE_CACHE_ROWS": str(ROWS),
    }


async def _url(process: subprocess.Popen[bytes], state: Path, log: Path) -> str:
    """Return the address once the engine is ready."""
    note = state / "run" / f"{NAME}.json"
    try:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while process.poll() is None:
                with contextlib.suppress(OSError, ValueError, KeyError, aiohttp.ClientError):
                    url = str(json.loads(note.read_text())["url"])
                    async with session.get(f"{url}/health") as response:  # /readyz may come before the weights
                        if response.status == 200 and (await response.json()).get("serving"):
                            return url
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        raise NotStarted(f"the engine was not ready within {START_S:g} s:\n{_last_words(log)}") from None
    raise NotStarted(f"the engine ended with exit code {process.returncode}:\n{_last_words(log)}")


def _last_words(log: Path) -> str:
    """Return why the engine ended, as it logged it, or else its last lines."""
    lines = log.read_text(errors="replace").splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and found.get("level") in ("error", "critical") and found.get("reason"):
                return str(found["reason"])
    return "\n".join(lines[-LAST_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
