"""Decoders as processes: starting them, asking them, and the environments that peers need."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.decoders import Batch, Ready, Took
from infra.setup import uv

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class Missing(RuntimeError):
    """A peer cannot run here; the text says why."""


class Decoder:
    """One running decoder. `name` is what it says of itself."""

    def __init__(self, module: str, *arguments: str, python: Path | None = None) -> None:
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe that nobody reads would fill up)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [str(python or sys.executable), "-m", f"benchmarks.decoders.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        try:
            self.name = Ready(**self._read()).name
        except BaseException:
            self.close()
            raise

    def decode(self, batch: Batch) -> Took:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(batch)) + "\n")
        self.process.stdin.flush()
        return Took(**self._read())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.said.close()

    def _read(self) -> dict:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        self.process.wait()
        self.said.seek(0)
        end = self.said.read().decode(errors="replace").strip()[-600:]
        raise Missing(f"{' '.join(map(str, self.process.args[1:4]))} ended: {end}")  # type: ignore[index]


@contextlib.contextmanager
def decoder(module: str, *arguments: str, python: Path | None = None) -> Iterator[Decoder]:
    """Raises Missing where it does not start."""
    running = Decoder(module, *arguments, python=python)
    try:
        yield running
    finally:
        running.close()


def environment(name: str, *, make: bool = True) -> Path:
    """The interpreter of a peer's own environment, made from `<name>.txt`, which names every package, where it is not there yet
    (llama.cpp is compiled for this machine: minutes; vLLM brings 6 GB), unless `make` is false. Raises Missing."""
    pins, folder = HERE / f"{name}.txt", ROOT / ".cache" / "peers" / name
    python, stamp = folder / "bin" / "python", folder / ".pins"
    if stamp.exists() and stamp.read_text() == pins.read_text():
        return python
    if not make:
        raise Missing(f"{name} is not installed, and nothing is installed with --quick; without it this benchmark does")
    print(f"installing {name} …", file=sys.stderr, flush=True)
    for command in (
        [*uv(), "venv", "-q", "--clear", "-p", sys.executable, str(folder)],
        [*uv(), "pip", "install", "-q", "--no-deps", "-p", str(python), "-r", str(pins)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"{name} cannot be installed: {done.stderr.strip()[-600:]}")
    stamp.write_text(pins.read_text())
    return python
