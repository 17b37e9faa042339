"""One nursery seen from outside, and the slot that keeps one alive: starts it, gives it runs, replaces it.

Blocking code on purpose: `shared.sandbox.pool` gives every slot a thread, Celery tasks and the curator call it directly.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from shared.sandbox import CallResult, FunctionRun, SandboxUnavailable
from shared.sandbox.inside.harness import TIMEOUT_EXIT
from shared.sandbox.inside.nursery import CUT, ORDER, REPLY
from shared.sandbox.meter import SAMPLE_S, Meter

START_S = 30.0  # a busy machine starts slowly
_GRACE_S = 10.0  # beyond a run's own deadline, until the nursery itself counts as dead
_RUNS_PER_NURSERY = 2000  # bounds what an unseen leak could add up to; a start costs as much as about 50 runs
_BROKEN = 125
# The kernel limits the processor time of one process, by ticks; measured on a busy machine it differs by a third. A run of one
# process that used more than this share of its limit has had others.
_OVERDRAWN = 1.5
CPU_LIMIT = "CpuLimit"  # the error of calls whose run used too much processor time in all its processes together
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}\Z")
_VALUE = re.compile(rb"[ -~]*\Z")  # canonical text has nothing else; people read what is kept


class NurseryDied(Exception):
    """The sandbox failed, not the candidate."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. `status`: as waitpid gives it. `late`: the deadline or the limit of one process's processor time ended it.
    `overdrawn`: its processes used too much processor time together."""

    status: int
    late: bool
    confined: bool
    overdrawn: bool


class Nursery:
    """The process, its control socket, its log, and from the end of its start-up on its meter. The socket is at its start-up
    time-out until the first run."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, log: IO[bytes]) -> None:
        self.process, self.control, self.log = process, control, log
        self.meter: Meter | None = None

    def expect(self, word: bytes) -> bool:
        """Waits for a word of the start-up. ValueError when something else came, OSError when nothing did."""
        found = self.control.recv(64)
        if found != word:
            raise ValueError(f"found {found!r}, expected {word!r}")
        return True

    def execute(self, order: bytes, fds: list[int], deadline_s: float, cpu_s: float) -> Ended:
        """Give it a run. End the run when its processes together have used more than `cpu_s`. Raises NurseryDied."""
        assert self.meter is not None
        try:
            self.meter.begin()
            self.control.settimeout(SAMPLE_S)
            socket.send_fds(self.control, [order], fds)
            reply, overdrawn = self._await_reply(time.monotonic() + deadline_s + _GRACE_S, cpu_s)
            status, late, confined, used_s = REPLY.unpack(reply)
            if self.meter.exact:
                used_s = self.meter.read().seconds
        except (OSError, ValueError) as error:
            raise NurseryDied(f"{error!r}; {self.last_words()}") from None
        except Exception as error:  # struct.error: the stream is no longer in step
            raise NurseryDied(repr(error)) from None
        return Ended(status, late, confined, overdrawn or used_s > _OVERDRAWN * cpu_s)

    def _await_reply(self, until: float, cpu_s: float) -> tuple[bytes, bool]:
        """Return the reply, and whether the run was ended for its processor time. Raises TimeoutError."""
        assert self.meter is not None
        cut = False
        while True:
            try:
                return self.control.recv(REPLY.size + 1), cut
            except TimeoutError:
                if time.monotonic() >= until:
                    raise
            if not cut and (found := self.meter.read()).seconds > cpu_s:
                cut = found.several or found.seconds > _OVERDRAWN * cpu_s
                if cut:
                    self.control.send(CUT)

    def last_words(self) -> str:
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        with contextlib.suppress(OSError, ValueError):
            self.log.seek(0)
            return self.log.read()[-2000:].decode(errors="replace").strip()
        return ""

    def kill(self) -> None:
        self.control.close()
        self.process.kill()  # bubblewrap dies with it, and the sandbox with that
        self.process.wait()
        self.log.close()
        if self.meter is not None:
            self.meter.close()


class Slot:
    """Runs one function at a time. Not thread-safe; a fork of the process leaves the nursery to the parent."""

    def __init__(self, start: Callable[[], Nursery], hidden_paths: Callable[[str], tuple[str, ...]]) -> None:
        self._start, self._hidden_paths = start, hidden_paths
        self._nursery: Nursery | None = None
        self._owner = self._runs = 0

    def run(self, run: FunctionRun) -> list[CallResult]:
        """One result per call. A nursery that dies is replaced and the run given once more; then SandboxUnavailable."""
        try:
            return self._attempt(run)
        except NurseryDied:
            self.close()
        try:
            return self._attempt(run)
        except NurseryDied as error:
            self.close()
            raise SandboxUnavailable(f"a fresh sandbox died twice under one run: {error}") from None

    def close(self) -> None:
        if self._nursery is not None and self._owner == os.getpid():
            self._nursery.kill()
        self._nursery = None

    def _ready(self) -> Nursery:
        if self._nursery is None or self._owner != os.getpid() or self._runs >= _RUNS_PER_NURSERY:
            self.close()
            self._nursery, self._owner, self._runs = self._start(), os.getpid(), 0
        self._runs += 1
        return self._nursery

    def _attempt(self, run: FunctionRun) -> list[CallResult]:
        nursery, limits = self._ready(), run.limits
        tops = sorted({name.partition(".")[0] for name in run.forbidden_imports})
        hide = [path for top in tops for path in self._hidden_paths(top)]
        request = {
            "source": run.source,
            "entry": run.entry,
            "args": run.args,
            "call_s": limits.call_s,
            "forbidden": tops,
            "hide": hide,
            "stop_at_error": run.stop_at_error,
        }
        cpu_s = max(1, math.ceil(limits.cpu_s or limits.time_s))
        order = ORDER.pack(
            limits.time_s, cpu_s, limits.memory_mb << 20, limits.processes, limits.output_bytes, bool(hide)
        )
        # Files without a name: the nursery never sees what is in them, a full one blocks nobody, and both end with the run.
        with (
            open(os.memfd_create("request"), "wb") as request_file,
            open(os.memfd_create("results"), "rb") as result_file,
        ):
            request_file.write(json.dumps(request).encode())
            request_file.flush()
            request_file.seek(0)
            ended = nursery.execute(order, [request_file.fileno(), result_file.fileno()], limits.time_s, cpu_s)
            result_file.seek(0)
            text = result_file.read(limits.output_bytes)
        if (
            not ended.confined and os.waitstatus_to_exitcode(ended.status) == _BROKEN
        ):  # no foreign code has written this
            raise NurseryDied(text.decode(errors="replace"))
        if ended.overdrawn:
            return [CallResult(None, CPU_LIMIT)] * len(run.args)
        return _results(text, len(run.args), ended.status, ended.late, run.stop_at_error)


def _results(text: bytes, calls: int, status: int, late: bool, stop_at_error: bool) -> list[CallResult]:
    """Reads the lines of a hostile process: too many are dropped, unfit ones are errors, missing ones say how it ended."""
    results: list[CallResult] = []
    *lines, rest = text.split(b"\n")
    for line in lines[:calls]:
        if line[:1] in (b"v", b"c") and _VALUE.match(line):
            results.append(CallResult(line[1:].decode("ascii"), changed=line[:1] == b"c"))
        else:
            name = line[1:].decode("ascii", "replace") if line[:1] == b"e" else ""
            results.append(CallResult(None, name if _NAME.match(name) else "Error"))
    if len(results) < calls:
        code = os.waitstatus_to_exitcode(status)
        if stop_at_error and results and results[-1].error:
            missing = "NotRun"
        elif late or code == TIMEOUT_EXIT:
            missing = "Timeout"
        else:
            missing = "OutputLimit" if rest else "Died"
        results += [CallResult(None, missing)] * (calls - len(results))
    return results
