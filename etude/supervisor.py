"""The supervisor: starts services as processes of their own, restarts what dies, stops them together.

Invariants:
- One supervisor per state directory (an advisory lock on `<state>/supervisor.lock`; the kernel drops it with us).
- When the supervisor is killed, the kernel tells every child to end (PR_SET_PDEATHSIG, SIGTERM): it drains and leaves.
- A service that dies is started again after a delay that doubles from 0.5 s to 30 s and returns to 0.5 s after a minute
  of health; it is never given up, and the log says each time what happened. One exception: REFUSED says that its settings
  are bad, and they are the same the next time.
- Stop means SIGTERM (services drain), SIGKILL only after a grace period. Services are a process group each: what a terminal
  sends to us does not reach them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from etude import service_logs
from shared.process import end_with
from shared.settings import REFUSED
from shared.visible import visible

FIRST_DELAY_S, LAST_DELAY_S, HEALTHY_AFTER_S = 0.5, 30.0, 60.0
GRACE_S = 15.0
DETACH_S = 20.0  # a busy machine imports slowly
LOOK_AT_LOGS_S = 10.0
LOCK = "supervisor.lock"  # in the state directory; holds the process id of whoever holds it


class AlreadyRunning(RuntimeError):
    """Another supervisor holds this state directory."""


class PortsTaken(RuntimeError):
    """A port that a service was to have belongs to another program; the text names it and the way out."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """`name` is unique within the supervisor; `module` is started as `python -m module`."""

    name: str
    module: str
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0


# Start order follows who waits on whom; nothing depends on it, every service waits by itself.
SERVICES: tuple[tuple[str, str], ...] = (
    ("scheduler", "services.scheduler"),
    ("curator", "services.curator"),
    ("trainer", "services.trainer"),
    ("inference", "services.inference"),
    ("reward", "services.reward"),
    ("grader", "services.reward.grader"),
    ("rollout", "services.rollout"),
    ("evaluator", "services.evaluator"),
    ("console", "services.console"),
)


def default_specs(base_port: int = 0) -> list[ServiceSpec]:
    """Every service once. Ports count from `base_port`; 0 lets each take a free one."""
    return [
        ServiceSpec(name, module, port=base_port + i if base_port else 0) for i, (name, module) in enumerate(SERVICES)
    ]


class _Child:
    def __init__(self, spec: ServiceSpec, state: Path) -> None:
        self.spec = spec
        self.state = state
        self.process: subprocess.Popen[bytes] | None = None
        self.wanted = True
        self.refused = False
        self.restarts = 0
        self.delay = FIRST_DELAY_S
        self.started = 0.0
        self.next_start = 0.0
        self.next_look = 0.0
        self.last_exit: int | None = None
        self.last_words = ""  # of the process that ended last
        self.log = state / "logs" / f"{spec.name}.log"

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        service_logs.set_aside(self.log)
        environment = {
            **os.environ,
            # One thread per process: on few cores more threads only spin, and starve whoever else is on the machine.
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "ETUDE_STATE": str(self.state),
            "ETUDE_NAME": self.spec.name,
            "ETUDE_PORT": str(self.spec.port),
            **self.spec.environment,
        }
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.spec.module],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                preexec_fn=end_with(os.getpid()),
                # A terminal's Ctrl-C is for us, and SIGTERM is what they hear of it: a second signal would cut their drain.
                process_group=0,
            )
        self.started = time.monotonic()

    def _start(self, now: float, say: Callable[[str], None]) -> None:
        """A disk that is full or a machine without processes left must not end whoever watches the others."""
        try:
            self.start()
        except OSError as error:
            self.next_start = now + self.delay
            say(f"{self.spec.name} cannot be started: {error}; trying again in {self.delay:g} s")
            self.delay = min(LAST_DELAY_S, self.delay * 2)

    def tick(self, now: float, say: Callable[[str], None]) -> None:
        """Reaps and restarts. Called a few times a second."""
        if not self.wanted:
            return
        if self.process is None:
            if now >= self.next_start:
                self._start(now, say)
            return
        code = self.process.poll()
        if code is None:
            if now - self.started > HEALTHY_AFTER_S:
                self.delay = FIRST_DELAY_S
            if now >= self.next_look:
                self.next_look = now + LOOK_AT_LOGS_S
                with contextlib.suppress(OSError):  # tried again at the next look
                    service_logs.begin_anew(self.log)
            return
        self.last_exit, self.last_words = code, service_logs.last_words(self.log) if code else ""
        self.process = None
        if code == REFUSED:
            self.wanted, self.refused = False, True
            say(
                f"{self.spec.name} cannot use its settings and is not started again; the last lines of {self.spec.name}.log say why"
            )
            return
        said = f". It said last: {visible(self.last_words)}" if self.last_words else ""
        self.restarts += 1
        self.next_start = now + self.delay
        say(
            f"{self.spec.name} ended with {words(code)}; starting it again in {self.delay:g} s (log: {self.spec.name}.log){said}"
        )
        self.delay = min(LAST_DELAY_S, self.delay * 2)


def words(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Supervisor:
    """Use as a context manager; `start` and `stop_service` may be called at any time from one thread."""

    def __init__(self, state: Path, say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)) -> None:
        self.state = state.resolve()
        self.say = say
        self._children: dict[str, _Child] = {}
        self._guard = threading.RLock()
        self._leave = threading.Event()
        self._lock_file: IO[str] | None = None
        self._written = ""  # what supervisor.json says
        # The death signal follows the thread that forked: children must be started by a thread that lives on.
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self.state.mkdir(parents=True, exist_ok=True)
        lock = (self.state / LOCK).open("a+")
        for _ in range(5):  # `holder` takes the lock for an instant to see whether it is free
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        else:
            lock.close()
            require_free(self.state)
            raise AlreadyRunning(f"{self.state}: already in use; give another folder with --state")
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock_file = lock
        self._thread.start()
        return self

    def start(self, specs: Iterable[ServiceSpec]) -> None:
        with self._guard:
            for spec in specs:
                self._children[spec.name] = _Child(spec, self.state)

    def stop_service(self, name: str, grace_s: float = GRACE_S) -> None:
        """SIGTERM, then SIGKILL after the grace period. The service is not started again."""
        with self._guard:
            child = self._children.get(name)
            if child is None:
                return
            child.wanted = False
            process = child.process
        if process:
            _end([process], grace_s)

    def processes(self) -> dict[str, int]:
        """Service name -> process id, of those that run now."""
        with self._guard:
            return {n: c.process.pid for n, c in self._children.items() if c.process and c.process.poll() is None}

    def refused(self) -> list[str]:
        """Services that cannot use their settings, and are not started again."""
        with self._guard:
            return [name for name, child in self._children.items() if child.refused]

    def restarts(self) -> dict[str, int]:
        with self._guard:
            return {n: c.restarts for n, c in self._children.items()}

    def _watch(self) -> None:
        while not self._leave.wait(0.1):
            now = time.monotonic()
            with self._guard:
                for child in self._children.values():
                    child.tick(now, self._say)
                with contextlib.suppress(OSError):  # only `etude status` reads it; the next turn tries again
                    self._write_state()

    def _say(self, text: str) -> None:
        """Where nobody can be told (a log on a disk that is full, a terminal or a pipe that is gone) we go on without a word:
        were this thread to end, the kernel would end every service with it."""
        with contextlib.suppress(OSError, ValueError):
            self.say(text)

    def _write_state(self) -> None:
        rows = {
            name: {
                "pid": child.process.pid if child.process else None,
                "restarts": child.restarts,
                "last_exit": child.last_exit,
                "last_words": child.last_words,
            }
            for name, child in self._children.items()
            if child.wanted or child.refused
        }
        text = json.dumps({"pid": os.getpid(), "services": rows}, sort_keys=True)
        path = self.state / "supervisor.json"
        if self._written != text:
            temporary = path.with_suffix(".tmp")
            temporary.write_text(text)
            temporary.replace(path)
            self._written = text

    def __exit__(self, *exc: object) -> None:
        with self._guard:
            for child in self._children.values():
                child.wanted = False
            processes = [child.process for child in self._children.values() if child.process]
        _end(processes, GRACE_S)
        self._leave.set()
        self._thread.join(timeout=2)
        (self.state / "supervisor.json").unlink(missing_ok=True)
        if self._lock_file:
            self._lock_file.close()


def holder(state: Path) -> int | None:
    """Process id of the supervisor of this state directory, by its lock; None: there is none. A file that a killed one
    left behind names a process that may be anybody's by now, so the file alone is never believed."""
    try:
        with (state / LOCK).open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return int(lock.read().strip() or 0) or None
    except (OSError, ValueError):
        pass
    return None


def require_free(state: Path) -> None:
    """Raises AlreadyRunning, which names the process and the way out."""
    if (pid := holder(state)) is not None:
        raise AlreadyRunning(
            f"{state}: already in use by the supervisor with process id {pid}; end it with `etude down --state {state}`, or give "
            "another folder with --state"
        )


def taken_ports(specs: Iterable[ServiceSpec]) -> list[int]:
    """Of the fixed ports that these services want, those that somebody else listens on."""
    taken, host = [], os.environ.get("ETUDE_HOST") or "127.0.0.1"
    for port in (spec.port for spec in specs if spec.port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the services do
            try:
                probe.bind((host, port))
            except OSError:
                taken.append(port)
    return taken


def require_ports(specs: Iterable[ServiceSpec], way_out: str) -> None:
    """Raises PortsTaken, which names the ports and the way out."""
    if taken := taken_ports(specs):
        ports = ", ".join(map(str, taken))
        raise PortsTaken(f"port {ports}: in use by another program; end it, or {way_out}")


def _end(processes: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def leave_by() -> list[signal.Signals]:
    """What ends a command and its services in order: Ctrl-C, `etude down`, and a terminal that goes (not under nohup)."""
    hangs_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangs_up]


def run_foreground(state: Path, base_port: int) -> None:
    """`etude up`: until SIGINT or SIGTERM."""
    leave = threading.Event()
    for number in leave_by():
        signal.signal(number, lambda *_: leave.set())
    try:
        with Supervisor(state) as supervisor:
            specs = default_specs(base_port)
            require_ports(specs, "give other ones with --base-port (0: free ones)")
            supervisor.start(specs)
            print(f"Services are starting; state in {supervisor.state}. `etude status` shows them, Ctrl-C ends them.")
            print(f"The console's token, for acting on runs: {supervisor.state}/console/token")
            leave.wait()
            print("Stopping: services drain …")
    except (AlreadyRunning, PortsTaken) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


def spawn_detached(state: Path, base_port: int) -> None:
    """`etude up --detach`: the same in a session of its own. Returns when that one holds the state directory and has
    started its services."""
    state.mkdir(parents=True, exist_ok=True)
    path = state / "supervisor.log"
    with path.open("ab") as log:
        before = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "etude.cli", "up", "--state", str(state), "--base-port", str(base_port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + DETACH_S
    while time.monotonic() < deadline and process.poll() is None:
        if _written_by(state) == process.pid:
            print(f"Running in the background (process {process.pid}). `etude status`, `etude logs -f`, `etude down`.")
            return
        time.sleep(0.1)
    if process.poll() is None:
        process.terminate()
    print(path.read_bytes()[before:].decode(errors="replace").strip()[-2000:], file=sys.stderr)
    raise SystemExit(1)


def _written_by(state: Path) -> int:
    """Which supervisor wrote supervisor.json and started services; 0: none."""
    try:
        found = json.loads((state / "supervisor.json").read_text())
        return int(found["pid"]) if found["services"] else 0
    except (OSError, ValueError, KeyError):
        return 0


def stop(state: Path) -> None:
    """`etude down`."""
    pid = holder(state)
    if pid is None:
        print(f"{state}: nothing is running here")
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S + 10
    while holder(state) == pid and time.monotonic() < deadline:
        time.sleep(0.1)
    print(
        "Stopped." if holder(state) != pid else f"Process {pid} has not ended yet; `etude status` shows what is left."
    )
