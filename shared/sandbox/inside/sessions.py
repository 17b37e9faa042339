"""A session: a shell that lives on, the script that it runs now, and the ladder that ends one.

A script past its time gets SIGINT, with its shell. Where the shell comes back and answers sensibly, what else the script started
is killed and the session goes on; else the whole session is killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from shared.sandbox.inside import cell, shell, tree
from shared.sandbox.inside.cells import HARD_S, READ, WRITE, Cell, some

_SOFT_S = 0.5  # for a script that was interrupted to come back to the shell
_CLEAR_S = 2.0  # for the kernel to end what an interrupted script has left
_DRAIN = 1 << 20  # the most that a pipe can hold
_CROWDED = 0.75  # of the limit on processes: then the session is ended
_READS = 5  # of the processes of a session, before those that come and go meanwhile are given up


class _Script:
    """The script that a shell runs now. `phase`: running; soft: interrupted; sync: it came back, and the shell is asked whether
    it is well; hard: its session is being killed."""

    def __init__(self, request: int, mark: str, keep: int, stdin: str) -> None:
        self.request, self.mark, self.stdin = request, mark, stdin
        self.out, self.err = shell.Kept(keep), shell.Kept(keep)
        self.begun, self.phase, self.cause = time.monotonic(), "running", ""
        self.told, self.crowded = b"", False
        self.code: int | None = None  # its own, where its session ends for another's doing


def _become(argv: tuple[str, ...], env: dict[str, str], cwd: str) -> None:
    with contextlib.suppress(OSError):  # else in the root folder
        os.chdir(cwd)
    os.execve(argv[0], argv, env)


class Session(Cell):
    """A shell that lives on. What background processes write between two scripts is dropped."""

    _script: _Script | None = None
    _pending = b""
    _env: dict[str, str] | None = None  # of a shell that waits for its session
    _cwd = ""
    _pair: tree.Pair | None = None  # the keeper and the shell

    def begin(self, argv: tuple[str, ...], env: dict[str, str], cwd: str) -> None:
        self._fork(functools.partial(_become, argv, env, cwd))
        if argv[0] == shell.BASH[0]:
            self._type(shell.QUIET)

    def prepare(self, argv: tuple[str, ...], env: dict[str, str], cwd: str) -> None:
        """Start the shell of a session that is yet to be asked for."""
        self._starting, self._env, self._cwd = None, env, cwd
        self.begin(argv, env, cwd)

    def adopt(self, number: int, request: int, env: dict[str, str], cwd: str) -> bool:
        """Give a prepared shell to a session. Return False where it is not ready or cannot be made like a new one."""
        lines = shell.changed(self._env or {}, env)
        shells = tree.children(self.pid)
        unready = self.dying or self._note_fd >= 0 or self._note or len(shells) != 1
        if self._env is None or unready or lines is None or cwd != self._cwd or number in self.loop.cells:
            return False
        cell.limit(self.loop.rules.processes, self.loop.rules.file_bytes, shells[0])
        self.loop.cells[number] = self.loop.cells.pop(self.number)
        self.number, self._env = number, None
        self._type(lines)
        self.loop.answer(request, {})
        return True

    def _fork(self, body: Callable[[], Any]) -> None:
        inside, self._in = os.pipe()
        self._ends: list[int] = []
        theirs = [inside]
        null = os.open("/dev/null", os.O_WRONLY)
        for _ in range(3):
            ours, other = os.pipe()
            self._ends.append(ours)
            theirs.append(other)
        fds = {0: inside, 1: null, 2: null, shell.OUT: theirs[1], shell.ERR: theirs[2], shell.TELL: theirs[3]}
        try:
            self._start(fds, body)
        except BaseException:
            for fd in (self._in, *self._ends):
                os.close(fd)
            raise
        self._spared: set[tuple[int, int]] = set()
        self._moving = False  # background processes forked or ended while they were last read: `_spared` may lack some
        self._restless = False  # background processes of earlier scripts have forked while no script ran
        for fd in (self._in, *self._ends):
            os.set_blocking(fd, False)
        for at, fd in enumerate(self._ends):
            self.loop.watch(fd, READ, functools.partial(self._read, at))

    def run(self, request: int, head: dict[str, Any], blob: bytes) -> None:
        if self._script is not None:
            raise ValueError("session: found a script running; one at a time")
        before, moving = self._spared, self._moving
        if (before or moving) and self._crowded():
            raise KeyError("shell: background processes leave no room for another")
        self._restless = moving or not self._spared <= before
        script, stdin = blob[: head["script"]], blob[head["script"] :]
        path = "/dev/null"
        mark = os.urandom(12).hex()
        if stdin:
            path = self._store(mark, stdin)
        text = shell.lines(script.decode("utf-8", "surrogateescape"), mark, path, head["env"], head["cwd"])
        self._script = _Script(request, mark, int(head["keep"]), path)
        self.deadline = self._script.begun + float(head["time_s"])
        self._type(text)

    def _store(self, mark: str, data: bytes) -> str:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        path = f"{self.loop.scratch}/{mark}"
        try:
            with open(os.open(path, flags, 0o644), "wb") as file:
                file.write(data)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return f"{self.loop.rules.scratch or self.loop.scratch}/{mark}"

    def _crowded(self) -> bool:
        """Remember the background processes, which outlive a script that is interrupted. Return whether they are so many that
        no script could run beside them, as a fork bomb's."""
        if self._pair is not None and self._pair.alone():
            self._spared, self._moving = set(), False
            return self._full(1)
        for _ in range(_READS):
            table = tree.read_below(self.pid)
            self._moving = len(table) > 2 and self._missed(table)  # the keeper and the shell alone: nothing is left
            if not self._moving:
                break
        pids = tree.below(table, self.pid)
        main = self._shell(table)
        self._spared = {(pid, table[pid].started) for pid in pids if pid != main}
        if self._pair is None and main:
            with contextlib.suppress(OSError):  # then every look is a long one
                self._pair = tree.Pair(self.pid, main)
        return self._full(sum(table[pid].threads for pid in pids))

    def _own_crowd(self, earlier: set[tuple[int, int]]) -> bool:
        """Return whether the script's processes and the shell fill the session: those below the shell and the orphans, without the
        processes of `earlier` and what descends from them. An orphan's script is not known: where processes of before have
        forked by themselves, orphans count as theirs."""
        table = tree.read_below(self.pid)
        shell_pid = self._shell(table)
        own = tree.below(table, shell_pid if self._restless else self.pid, earlier) | ({shell_pid} & table.keys())
        return self._full(sum(table[pid].threads for pid in own))

    def _full(self, threads: int) -> bool:
        return 0 < self.loop.crowd * _CROWDED <= threads

    def seen(self, threads: int) -> None:
        if self._script is not None and self._full(threads):
            self._script.crowded = True

    def _shell(self, table: dict[int, tree.Process]) -> int:
        """Return the pid of the shell, the keeper's first child; 0: it is gone."""
        children = [(one.started, pid) for pid, one in table.items() if one.parent == self.pid]
        return min(children)[1] if children else 0

    def late(self) -> None:
        script = self._script
        if script is None:
            super().late()
        elif script.phase == "running":
            script.cause = "time_limit"
            self._interrupt(script)
        elif script.phase in ("soft", "sync"):
            self._end(script)
        else:
            self._script, self.deadline = None, None
            self.loop.answer(script.request, {"error": "a session does not end", "kind": "broken"})

    def _interrupt(self, script: _Script) -> None:
        """Send SIGINT to the shell, then to what the script started. With a subshell the session ends instead: it would read the
        next script in the shell's place."""
        table = tree.read_below(self.pid)
        main = self._shell(table)
        new = tree.below(table, self.pid, self._spared) - {main}
        if not main or any(_line_of(pid) == _line_of(main) for pid in new):
            self._end(script)
            return
        script.phase, self.deadline = "soft", time.monotonic() + _SOFT_S
        tree.send([main], signal.SIGINT)
        tree.send(new, signal.SIGINT)

    def _came_back(self, script: _Script) -> None:
        """The interrupted shell takes input again: kill what else the script started, and see whether the shell is well. Where the
        script's processes fork faster than they are killed, end the session."""
        if not self._killed_rest():
            self._end(script)
            return
        script.phase, self.deadline = "sync", time.monotonic() + _SOFT_S
        script.mark, script.told = os.urandom(12).hex(), b""
        self._type(b"command printf '%s 0\\n' " + script.mark.encode() + b" >&9\n")

    def _killed_rest(self) -> bool:
        """Kill all but the shell and the spared. Return whether none is left."""
        deadline = time.monotonic() + _CLEAR_S
        while time.monotonic() < deadline:
            table = tree.read_below(self.pid)
            new = {pid for pid in tree.below(table, self.pid, self._spared) if not table[pid].zombie}
            new -= {self._shell(table)}
            if not new and not self._missed(table):
                return True
            tree.send(new, signal.SIGSTOP)  # first: what is stopped does not fork while the others are killed
            tree.send(new, signal.SIGKILL)
            time.sleep(0.001)  # for the kernel to end them
        return False

    def _missed(self, table: dict[int, tree.Process]) -> bool:
        """Return whether the table lacks processes: what forks and ends while it is read is in no table, but its child is at every
        moment one of the shell's or, once its parent has ended, of the keeper's. So the shell is asked first."""
        return any(pid not in table for parent in (self._shell(table), self.pid) for pid in tree.children(parent))

    def _end(self, script: _Script) -> None:
        script.phase, self.deadline = "hard", time.monotonic() + HARD_S
        self.dying = True
        tree.send([self.pid], signal.SIGKILL)

    def strike(self, cause: str) -> None:
        if self._script is not None:
            self._script.cause = self._script.cause or cause
            self._end(self._script)
        else:
            super().strike(cause)

    def kill(self, request: int) -> None:
        if self._script is not None:
            self._script.phase = "hard"
        super().kill(request)

    def ended(self, code: int) -> None:
        script = self._script
        for at in range(3):
            self._drain(at)
        for fd in (self._in, *self._ends):
            self.loop.close(fd)
        self._ends = []
        if self._pair is not None:
            self._pair.close()
            self._pair = None
        if script is not None:
            self._finish(
                script, script.code if script.phase == "hard" else code, script.cause or "session_ended", fresh=True
            )
        super().ended(code)

    def _finish(self, script: _Script, code: int | None, cause: str, *, fresh: bool) -> None:
        self._script, self.deadline = None, None
        out, err = script.out.whole(), shell.without_noise(script.err.whole(), ended=fresh)
        head = {"code": code, "cause": cause, "fresh": fresh, "seconds": time.monotonic() - script.begun}
        head |= {"lost": script.out.lost + script.err.lost, "out": len(out), "kills": self.loop.kills}
        head["crowded"] = int(script.crowded)
        if fresh and self._note:
            head |= {"error": self._note.decode(errors="replace"), "kind": "broken"}
        self.loop.answer(script.request, head, out + err)
        if script.stdin != "/dev/null":
            with contextlib.suppress(OSError):
                os.unlink(f"{self.loop.scratch}/{os.path.basename(script.stdin)}")

    def _type(self, data: bytes) -> None:
        self._pending += data
        self._feed(WRITE)

    def _feed(self, events: int) -> None:
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._in, self._pending) :]
        except BlockingIOError:
            pass
        except OSError:
            self._pending = b""  # the shell is gone; its end is told when the keeper is reaped
        self.loop.watch(self._in, WRITE if self._pending else 0, self._feed)

    def _take(self, at: int, data: bytes) -> None:
        script = self._script
        if script is None:
            return
        if at < 2:
            (script.out, script.err)[at].add(data)
        else:
            script.told = (script.told + data)[-8192:]

    def _read(self, at: int, events: int) -> None:
        data = some(self._ends[at])
        if data is None:
            return
        if not data:
            self.loop.watch(self._ends[at], 0, self._feed)
            return
        self._take(at, data)
        if at == 2 and self._script is not None:
            self._told(self._script)

    def _told(self, script: _Script) -> None:
        code = shell.code_after(script.mark, script.told)
        if code is None:
            return
        if script.phase == "running":
            for at in range(2):
                self._drain(at)
            cause, earlier = "signalled" if 128 < code <= 192 else "exited", self._spared
            if self._crowded():
                script.cause = "process_limit"
                if not self._own_crowd(earlier):  # a fork bomb of before: not this script's doing
                    script.code, script.cause = code, cause
                self._end(script)
                return
            self._finish(script, code, cause, fresh=False)
        elif script.phase == "soft":
            self._came_back(script)
        elif script.phase == "sync":
            for at in range(2):
                self._drain(at)
            self._finish(script, None, script.cause, fresh=False)

    def _drain(self, at: int) -> None:
        """Take what was written before the script ended, and no more than a pipe can hold: a background process may go on."""
        left = _DRAIN
        while left > 0 and (data := some(self._ends[at])):
            left -= len(data)
            self._take(at, data)


def _line_of(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(4096)
    except OSError:
        return b""
