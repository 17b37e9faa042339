"""The first process inside a sandbox: it starts cells and speaks for them on one channel. Standard library only, Python 3.9 on.

Invariants:
- It runs no foreign code. What comes from a cell is bytes that it counts, cuts and passes on; it parses only the line by which a
  shell tells that a script has ended, and that line decides nothing but its own session's result.
- Nothing in a cell can open the channel: cells close all descriptors, and the loop is not dumpable.
- What it holds is bounded: per command by the caps of its output, per process by WINDOW.
- When the channel ends, everything ends.

Requests (`do`), each answered once; `id` is a number that the adapter chose:
  set      processes, file_bytes, memory_bytes (0: no watch), crowd (the limit on processes by
           which a session counts as full): limits of cells that start later
  prepare  env, cwd: start the shell of the next session
  session  id, env, cwd: start a shell, or take the one that is prepared
  run      session, time_s, keep, env, cwd, script (bytes of the blob, the rest is standard input)
           -> code, cause, lost, fresh, seconds, out (bytes of the blob, the rest is standard error), kills, crowded
  start    id, argv, env, cwd | id, transfer: start a program or a transfer (transfer.py)
  write    id, end, blob: to its standard input, or into a connection; answered when the program took it all
  credit   id, bytes: so much of its output was used; no answer
  kill     id; answered when nothing of the cell is alive, or the connection is closed
  listen   port: of 127.0.0.1, until the loop ends; carry what connects (connections.py)
  strike   cause: end every cell, running commands with this cause; answered when none is alive
Frames OUTPUT and ENDED (code, note) tell of a program or a connection, OPENED of a new connection.
An answer with `error` has `kind`: gone, refused, broken.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from shared.sandbox.inside import cell, confine, frames, shell, transfer, tree
from shared.sandbox.inside.cells import Cell, Process
from shared.sandbox.inside.connections import Connection, Door
from shared.sandbox.inside.sessions import Session

_TICK_S = 0.05
_SPARE = -1  # the number of the shell that is started before its session; no adapter chooses it
_TMPFS = ("/dev/shm",)  # what lies there counts as memory


class Loop:
    """See the module. `inward`, `outward`: the channel's ends, which may be one descriptor."""

    def __init__(self, inward: int, outward: int, rules: cell.Rules, scratch: str) -> None:
        self.rules, self.scratch = rules, scratch
        self.selector = selectors.DefaultSelector()
        self.cells: dict[int, Cell] = {}
        self.door: Door | None = None
        self.memory_bytes = 0
        self.crowd = 0  # processes and threads that may be alive; 0: any number
        self.kills = 0  # processes that the memory watch has killed
        self._inward, self._outward = inward, outward
        self._splitter, self._waiting = frames.Splitter(), bytearray()
        self._taken = memoryview(bytearray(1 << 18))
        self._ticked = 0.0
        self._strikes: list[tuple[int, set[int]]] = []

    def serve(self) -> None:
        """Return when the channel ends."""
        waker, wake = os.pipe()
        for fd in {self._inward, self._outward, waker, wake}:
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(waker, selectors.EVENT_READ, lambda _: self._reap(waker))
        self.selector.register(self._inward, selectors.EVENT_READ, self._channel)
        self.tell(
            frames.message(
                frames.ANSWER, 0, {"ready": 1, "namespaces": self.rules.namespaces, "shell": self.shell()[0]}
            )
        )
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                for key, events in self.selector.select(self._pause()):
                    if key.fd in self.selector.get_map() and self.selector.get_map()[key.fd] is key:
                        key.data(events)
                self._time()

    def shell(self) -> tuple[str, ...]:
        return shell.BASH if os.path.exists(f"{self.rules.root}{shell.BASH[0]}") else shell.SH

    # The channel

    def tell(self, frame: bytes) -> None:
        self._waiting += frame
        self._flush()

    def answer(self, number: int, head: dict[str, Any], blob: bytes = b"") -> None:
        self.tell(frames.message(frames.ANSWER, number, head, blob))

    def _flush(self) -> None:
        while self._waiting:
            try:
                sent = os.write(self._outward, self._waiting[: 1 << 20])
            except BlockingIOError:
                break
            del self._waiting[:sent]
        self._interest()

    def _interest(self) -> None:
        write = selectors.EVENT_WRITE if self._waiting else 0
        if self._inward == self._outward:
            self.watch(self._inward, selectors.EVENT_READ | write, self._channel)
        else:
            self.watch(self._outward, write, self._channel)

    def _channel(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            size = os.readv(
                self._inward, [self._taken]
            )  # into one place: the C library maps pages for each long answer
        except BlockingIOError:
            return
        if not size:
            raise EOFError
        for kind, number, payload in self._splitter.feed(self._taken[:size]):
            if kind == frames.REQUEST:
                head, blob = frames.parse(payload)
                self._serve_one(number, head, blob)

    def _serve_one(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        try:
            getattr(self, f"_do_{head['do']}")(number, head, blob)
        except KeyError as error:
            self.answer(number, {"error": f"no {error}", "kind": "gone"})
        except ValueError as error:
            self.answer(number, {"error": str(error), "kind": "refused"})
        except (OSError, confine.Unconfinable) as error:
            self.answer(number, {"error": f"{type(error).__name__}: {error}", "kind": "broken"})

    # Requests

    def _do_set(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        self.rules.processes, self.rules.file_bytes = int(head["processes"]), int(head["file_bytes"])
        self.memory_bytes = int(head["memory_bytes"])
        self.crowd = int(head.get("crowd", self.rules.processes))
        self.answer(number, {})

    def _do_session(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        spare = self.cells.get(_SPARE)
        if isinstance(spare, Session):
            if spare.adopt(int(head["id"]), number, head["env"], head["cwd"]):
                return
            spare.strike("of no use")
        session = Session(self, int(head["id"]), number)
        session.begin(self.shell(), head["env"], head["cwd"])

    def _do_prepare(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        Session(self, _SPARE, number).prepare(self.shell(), head["env"], head["cwd"])
        self.answer(number, {})

    def _do_run(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        session = self.cells[head["session"]]
        if not isinstance(session, Session):
            raise KeyError(head["session"])
        session.run(number, head, blob)

    def _do_start(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        process = Process(self, int(head["id"]), number)
        if "transfer" in head:
            order = head["transfer"]
            process.begin(lambda: transfer.serve(order), merged=False)
        else:
            process.begin(program(head["argv"], head["env"], head["cwd"]), merged=True)

    def _do_write(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        found = self._piped(head["id"])
        if found is None:
            raise KeyError(head["id"])
        found.write(number, blob, bool(head.get("end")))

    def _do_credit(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        found = self._piped(head["id"])
        if found is not None:
            found.credit(int(head["bytes"]))

    def _piped(self, number: int) -> Process | Connection | None:
        if self.door is not None and number in self.door.connections:
            return self.door.connections[number]
        found = self.cells.get(number)
        return found if isinstance(found, Process) else None

    def _do_kill(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        found = self._piped(head["id"])
        if isinstance(found, Connection):
            found.close()
        if head["id"] not in self.cells:
            return self.answer(number, {})
        return self.cells[head["id"]].kill(number)

    def _do_listen(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        if self.door is not None:
            raise ValueError(f"listen: found a door at port {self.door.port}; allowed: one")
        self.door = Door(self, int(head["port"]))
        self.answer(number, {"port": self.door.port})

    def _do_strike(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        living = [one for one in self.cells.values() if one.alive]
        for one in living:
            one.strike(str(head["cause"]))
        self._strikes.append((number, {one.number for one in living}))
        self._struck(-1)

    def _struck(self, gone: int) -> None:
        """Answer those strikes that have ended every cell. `gone`: a cell that has just ended."""
        for number, left in self._strikes:
            left.discard(gone)
            if not left:
                self.answer(number, {})
        self._strikes = [one for one in self._strikes if one[1]]

    # Descriptors, deadlines and ends

    def watch(self, fd: int, events: int, call: Callable[[int], None]) -> None:
        """Call back at events of a descriptor; 0: no more."""
        known = self.selector.get_map().get(fd)
        if not events:
            if known is not None:
                self.selector.unregister(fd)
        elif known is None:
            self.selector.register(fd, events, call)
        elif known.events != events:
            self.selector.modify(fd, events, call)

    def close(self, fd: int) -> None:
        self.watch(fd, 0, self._channel)
        os.close(fd)

    def _pause(self) -> float | None:
        """Return the seconds until something must be looked at; None: nothing."""
        now = time.monotonic()
        times = [one.deadline for one in self.cells.values() if one.deadline is not None]
        if self.memory_bytes and self.cells:
            times.append(self._ticked + _TICK_S)
        return max(0.0, min(times) - now) if times else None

    def _time(self) -> None:
        now = time.monotonic()
        for one in list(self.cells.values()):
            if one.deadline is not None and one.deadline <= now:
                one.late()
        if self.memory_bytes and self.cells and now - self._ticked >= _TICK_S:
            self._weigh()
            self._ticked = time.monotonic()

    def _reap(self, waker: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(waker, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            for one in list(self.cells.values()):
                if one.pid == pid:
                    if not self.rules.namespaces:
                        self._end_orphans()
                    one.ended(code)
                    self._struck(one.number)

    def _end_orphans(self) -> None:
        """Without namespaces: kill what a keeper left behind, because the code inside had killed it."""
        keepers = {(one.pid, one.born) for one in self.cells.values() if one.pid}
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            table = tree.read()
            left = {pid for pid in tree.below(table, os.getpid(), keepers) if not table[pid].zombie}
            for pid in [pid for pid, process in table.items() if process.parent == os.getpid() and process.zombie]:
                if all(one.pid != pid for one in self.cells.values()):
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            if not left:
                return
            tree.send(left, signal.SIGKILL)
            time.sleep(0.001)

    def _weigh(self) -> None:
        """Where no cgroup limits memory: kill the largest process while all cells together hold too much."""
        table = tree.read()
        pids = {pid for one in self.cells.values() for pid in tree.below(table, one.pid)}
        for one in self.cells.values():
            one.seen(sum(table[pid].threads for pid in tree.below(table, one.pid)))
        held = sum(table[pid].resident for pid in pids) * os.sysconf("SC_PAGESIZE")
        for folder in _TMPFS:
            with contextlib.suppress(OSError):
                found = os.statvfs(f"{self.rules.root}{folder}")
                held += (found.f_blocks - found.f_bfree) * found.f_frsize
        if held > self.memory_bytes and pids:
            tree.send([max(pids, key=lambda pid: table[pid].resident)], signal.SIGKILL)
            self.kills += 1


def program(argv: list[str], env: dict[str, str], cwd: str) -> Callable[[], None]:
    """Return a cell's body that becomes the program."""

    def body() -> None:
        os.chdir(cwd)
        if "/" in argv[0]:
            os.execve(argv[0], argv, env)
        for folder in env.get("PATH", "/usr/bin:/bin").split(":"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                os.execve(f"{folder or '.'}/{argv[0]}", argv, env)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])

    return body


def main() -> None:
    """Serve on standard input and output, in a container that somebody else has made."""
    import tempfile  # the loop of bubblewrap starts without it

    inward, outward = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    for fd in (inward, outward):
        os.set_inheritable(fd, False)
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    cell.hide_self()
    cell.adopt()
    scratch = tempfile.mkdtemp(prefix="etude-", dir=options.get("scratch", "/tmp"))
    Loop(
        inward, outward, cell.Rules(namespaces=options.get("namespaces", True) and cell.namespaces_allowed()), scratch
    ).serve()
    tree.end_all(os.getpid(), cell._reap)


if __name__ == "__main__":
    main()
