"""Starts the ranks of a trainer as processes of this machine, joined by gloo.

To import torch and DeepSpeed takes a process many seconds. So one process imports them, and forks the ranks of every test.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SAID = "rank says: "
DEADLINE_S = 900.0  # for all ranks of a test; machines may be busy


@dataclass(frozen=True)
class Ended:
    """`code`: as of a process; -9: it was killed. `said`: what it wrote."""

    code: int
    said: str

    @property
    def lines(self) -> list[str]:
        """What it said with `say`: libraries write too."""
        return [line.removeprefix(SAID) for line in self.said.splitlines() if line.startswith(SAID)]


def say(*words: object) -> None:
    print(SAID + " ".join(map(str, words)), flush=True)


def run_ranks(script: Path, arguments: Sequence[str], ranks: int, **environment: str) -> list[Ended]:
    """Run a script once for each rank, with what a launcher sets, until all have ended. They find this folder's modules. Those
    that do not end within DEADLINE_S are killed."""
    nursery = _nursery()
    assert nursery.stdin
    assert nursery.stdout
    nursery.stdin.write(json.dumps([str(script), list(arguments), ranks, environment]) + "\n")
    nursery.stdin.flush()
    return [Ended(*rank) for rank in json.loads(nursery.stdout.readline())]


_running: list[subprocess.Popen[str]] = []


def _nursery() -> subprocess.Popen[str]:
    if not _running or _running[0].poll() is not None:
        path = os.pathsep.join([str(HERE.parents[2]), str(HERE)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        _running[:] = [
            subprocess.Popen(
                [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        ]
    return _running[0]


def main() -> None:
    """Until the test process ends: read a job, fork its ranks, wait for them, say how they ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is imported may print
    import synthetic  # noqa: F401

    import services.trainer.training  # noqa: F401

    for line in sys.stdin:
        answers.write(json.dumps(_run(*json.loads(line))) + "\n")
        answers.flush()


def _run(script: str, arguments: list[str], ranks: int, environment: dict[str, str]) -> list[tuple[int, str]]:
    with socket.socket() as found, tempfile.TemporaryDirectory() as folder:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
        found.close()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), **environment}
        running: dict[int, int] = {}
        for rank in range(ranks):
            own = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pid = os.fork()
            if pid == 0:
                _be_rank(script, arguments, own, f"{folder}/{rank}")
            running[rank] = pid
        codes: dict[int, int] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(codes) < ranks:
            for rank in running.keys() - codes.keys():
                ended, status = os.waitpid(running[rank], os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(running[rank], signal.SIGKILL)
            time.sleep(0.02)
        return [(codes[rank], Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def _be_rank(script: str, arguments: list[str], environment: dict[str, str], said: str) -> None:
    """In the child: never returns."""
    code = 1
    try:
        file = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
