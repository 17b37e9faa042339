"""The grader's side of the term worker: asks it, waits no longer than a term may take, and kills it where one takes longer.

Invariants
- `look` always returns, and every name has an outcome: a finding, nothing found, or a quarantine with the reason.
- A term that hangs or kills the worker costs one time limit and is named; the terms behind it are computed by a new worker.
- After LATE such ends a term rests for REST_S: a pattern that explodes on every attempt does not slow all grading down.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections import Counter

import msgspec
import structlog

from services.reward.behaviour import Behaviour
from services.reward.term_worker import Answer, Look, Ready, send
from shared.contracts.graded import Finding
from shared.process import end_with, kill

TERM_S = 3.0  # wall clock of one term on one attempt; they take a millisecond
READY_S = 60.0  # a new process on a busy machine, and a tokenizer of a large vocabulary
LATE, REST_S = 3, 600.0
_ANSWERS = Ready | Answer

log = structlog.get_logger()


class _Ended(Exception):
    """The worker is no more, or was killed because it took too long; the text says which."""


class _NotReady(Exception):
    """The worker did not come as far as the first term; the text says why."""


class TermWorkers:
    """One worker at a time, started when it is needed. Not thread-safe: one per grader."""

    def __init__(self, term_s: float = TERM_S, ready_s: float = READY_S) -> None:
        self._term_s, self._ready_s = term_s, ready_s
        self._process: subprocess.Popen[bytes] | None = None
        self._late: Counter[str] = Counter()
        self._resting: dict[str, float] = {}  # term -> until when
        self._buffer = bytearray()

    def look(self, look: Look) -> Behaviour:
        """Compute the terms of `look`. Never raises for what a term does."""
        found, waiting = Behaviour(), []
        for name in look.names:
            if self._resting.get(name, 0.0) > time.monotonic():
                found.add(name, f"rests for {REST_S:.0f} s: it was killed {LATE} times")
            else:
                waiting.append(name)
        fresh = False
        while waiting:
            try:
                self._ask(msgspec.structs.replace(look, names=waiting))
                for name in list(waiting):
                    found.add(name, self._answer(name))
                    waiting.remove(name)
                    self._late.pop(name, None)
            except _NotReady as error:
                if fresh:  # a new worker cannot even read the attempt
                    for name in waiting:
                        found.add(name, f"term worker: {error}")
                    return found
                fresh = True
            except _Ended as error:
                found.add(name := waiting.pop(0), str(error))
                self._blame(name, str(error))
        return found

    def close(self) -> None:
        if self._process is not None:
            kill(self._process)
        self._process = None
        self._buffer.clear()

    def _blame(self, name: str, reason: str) -> None:
        self._late[name] += 1
        log.warning("term_killed", term=name, reason=reason, times=self._late[name])
        if self._late[name] >= LATE:
            self._resting[name] = time.monotonic() + REST_S
            del self._late[name]

    def _ask(self, look: Look) -> None:
        """Send the attempt and wait until the worker has read it. Raises _NotReady."""
        process = self._started()
        assert process.stdin is not None
        try:
            send(process.stdin, look)
            if not isinstance(self._message(self._ready_s), Ready):
                raise _Ended("it answered out of turn")
        except (OSError, ValueError, _Ended) as error:
            self.close()
            raise _NotReady(str(error)) from None

    def _answer(self, name: str) -> Finding | str:
        try:
            message = self._message(self._term_s)
            if not isinstance(message, Answer) or message.name != name:
                raise _Ended("the worker answered out of turn")
        except _Ended:
            self.close()
            raise
        return message.found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.reward.term_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                preexec_fn=end_with(os.getpid()),
            )
        return self._process

    def _message(self, seconds: float) -> Ready | Answer:
        """Raises _Ended where none comes in time."""
        deadline = time.monotonic() + seconds
        size = int.from_bytes(self._exactly(4, deadline, seconds), "little")
        try:
            return msgspec.msgpack.decode(self._exactly(size, deadline, seconds), type=_ANSWERS)
        except msgspec.MsgspecError as error:
            raise _Ended(f"its answer cannot be read: {error}") from None

    def _exactly(self, count: int, deadline: float, seconds: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while len(self._buffer) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise _Ended(f"killed after {seconds:g} s without an answer")
            if not (part := os.read(pipe, 1 << 16)):
                raise _Ended(f"ended the term worker ({_how(self._process)})")
            self._buffer += part
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data


def _how(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    return f"exit status {process.returncode}"
