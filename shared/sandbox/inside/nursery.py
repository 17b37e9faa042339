"""The process that bubblewrap starts: a warm interpreter that forks one confined child per run and never reads a run.

Invariants:
- It runs no foreign code and parses none: a run arrives as two file descriptors (request, results) which only the child
  touches. What an earlier run contained is therefore not in the memory that the next one inherits.
- A child is PID 1 of its own PID namespace: when it ends or the deadline kills it, the kernel kills whatever it started.
  Only then the nursery answers.
- Whether a child was confined is told on a pipe that it closes before foreign code runs: no candidate can say of itself
  that its sandbox broke.
- It ends when its control socket closes.

Protocol, on the SEQPACKET socket whose number is argv[1]: it sends `ready` (before that, as real root, `map`, and waits
for the outside to write its id map); then per run ORDER in, two descriptors with it; REPLY out. CUT may come at any time
after an ORDER: a run that is still there ends like one at its deadline.
"""

from __future__ import annotations

import _socket
import array
import contextlib
import gc
import json
import os
import select
import signal
import struct
import sys

from shared.sandbox.inside import confine, harness

# deadline s, processor s, memory bytes, processes, output bytes, hides files (needs a mount namespace)
ORDER = struct.Struct("<dIQIQ?")
# exit status as waitpid gives it, hit the deadline or the processor limit, was confined, processor seconds
REPLY = struct.Struct("<i??d")
CUT = b"cut"  # from outside: end the run now
UID = 1000  # inside the user namespace
_BROKEN = 125  # the child could not confine itself: never the candidate's doing


def _receive(control: _socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = control.recvmsg(ORDER.size, _socket.CMSG_SPACE(2 * fds.itemsize))
    for level, kind, payload in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            fds.frombytes(payload)
    return data, list(fds)


def _child(
    order: tuple[float, int, int, int, int, bool],
    request_fd: int,
    out: int,
    confined: tuple[int, int],
    control_fd: int,
    isolated: bool,
) -> None:
    """Never returns. `confined`: the pipe's ends."""
    try:
        os.close(control_fd)
        os.dup2(1, 2)  # to /dev/null; standard error is the nursery's log
        os.setsid()
        _, cpu_s, memory, processes, output, _ = order
        with open(request_fd, "rb") as file:
            request = json.loads(file.read())
        if isolated:
            confine.hide(request["hide"])
        confine.limit(memory=memory, processes=processes, output=output, cpu_s=cpu_s)
        if isolated:
            confine.give_up_privileges()
        os.write(confined[1], b"1")
        os.close(confined[0])
        os.close(confined[1])
    except BaseException as error:
        os.write(out, str(error).encode()[:500])
        os._exit(_BROKEN)
    try:
        harness.serve(request, out)
    finally:
        os._exit(0)


def _watch(pid: int, deadline_s: float, cpu_s: int, confined: int, control: _socket.socket, isolated: bool) -> bytes:
    """Waits for the child, kills it at the deadline, reaps it: then nothing of the run is alive. `confined`: the end of
    the pipe to read from."""
    handle = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(control.fileno(), select.POLLIN)
    events = dict(poll.poll(deadline_s * 1000))
    if control.fileno() in events and control.recv(len(CUT)) != CUT:
        os._exit(0)  # it was closed. As PID 1 of the sandbox: everything in it dies
    late = handle not in events
    if late:
        os.kill(pid, signal.SIGKILL)
    if not isolated:  # without a PID namespace only the group can be reached
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    os.close(handle)
    used = usage.ru_utime + usage.ru_stime
    # The limit counts the clock's ticks, `used` is measured: on a busy machine they differ by a third.
    late = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and used > cpu_s / 2)
    return REPLY.pack(status, late, os.read(confined, 1) == b"1", used)


def main() -> None:
    mode, control = sys.argv[1], _socket.socket(fileno=int(sys.argv[2]))
    # Celery sets a default timeout of the whole parent process at times. A socket that is made meanwhile does not block.
    control.setblocking(True)
    isolated = mode != "process"
    if mode == "root":
        confine.enter_user_namespace()
        control.send(b"map")
        control.recv(1)
        confine.become(UID)
    sys.path[:] = [path for path in sys.path if path != os.environ.get("PYTHONPATH")]
    harness.warm()
    harness.withdraw()
    gc.collect()
    gc.freeze()  # the collector of a child would touch, and so copy, every page
    control.send(b"ready")
    while True:
        data, fds = _receive(control)
        if not data:
            return
        if data == CUT:  # of a run that had just ended
            continue
        order = ORDER.unpack(data)
        flags = (confine.CLONE_NEWPID | (confine.CLONE_NEWNS if order[5] else 0)) if isolated else 0
        confined = os.pipe()
        pid = confine.fork_into_namespaces(flags) if isolated else os.fork()
        if pid == 0:
            _child(order, fds[0], fds[1], confined, control.fileno(), isolated)
        for fd in (*fds, confined[1]):
            os.close(fd)
        control.send(_watch(pid, order[0], order[1], confined[0], control, isolated))
        os.close(confined[0])


if __name__ == "__main__":
    main()
