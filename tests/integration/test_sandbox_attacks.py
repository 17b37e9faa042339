"""What hostile code tries, and what comes of it. Each test runs the attack and then an honest run beside or after it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from shared.environments.function.runs import PROCESSES, run_of
from shared.problems import Case, FunctionProblem
from shared.problems.values import decode, encode, equal
from shared.sandbox import CallResult, FunctionRun, Limits, bubblewrap, connect
from shared.sandbox.inside import confine, nursery
from shared.sandbox.inside.needed_calls import NEEDED
from shared.sandbox.pool import FunctionPool
from tests.patience import patient, until

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")
HONEST = FunctionRun("def f(): return 'fine'", "f", ("[]",), Limits(time_s=120.0))


@pytest.fixture(scope="module")
def functions() -> Iterator[FunctionPool]:
    pool = connect("bubblewrap", workers=1)
    yield pool
    pool.close_sync()


def attack(pool: FunctionPool, source: str, *args: object, time_s: float = 60.0, **options: object) -> list[CallResult]:
    """Runs it, then checks that the same nursery still serves an honest run and that no process of the attack is left."""
    pool.run_sync([HONEST])
    before = sandboxed()
    calls = tuple(encode([a]) for a in args) or ("[]",)
    limits = Limits(time_s=time_s, call_s=5.0, **options)  # type: ignore[arg-type]
    results = pool.run_sync([FunctionRun(source, "f", calls, limits)])[0]
    until(lambda: sandboxed() == before, "the processes of a run to end, and no nursery to be lost")
    assert pool.run_sync([HONEST]) == [[CallResult('"fine"')]]
    return results


def sandboxed() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def value(results: list[CallResult]) -> object:
    assert results[0].value is not None, results[0].error
    return decode(results[0].value)


def test_a_fork_bomb_ends_with_its_run(functions: FunctionPool) -> None:
    source = """
import os
def f():
    while True:
        try:
            os.fork()
        except OSError:
            pass
"""
    assert attack(functions, source, time_s=1.0)[0].value is None


def test_processes_are_limited(functions: FunctionPool) -> None:
    source = """
import os, time
def f():
    for n in range(1000):
        try:
            if os.fork() == 0:
                time.sleep(60)
        except BlockingIOError:
            return n
"""
    count = value(attack(functions, source, processes=8))
    assert isinstance(count, int)
    assert 1 <= count <= 8


def test_an_endless_loop_in_native_code_ends_at_the_deadline(functions: FunctionPool) -> None:
    assert attack(functions, "def f(): return sum(range(10**12))", time_s=0.5) == [CallResult(None, "Timeout")]


def test_endless_output_fills_nothing(functions: FunctionPool) -> None:
    source = """
import sys
def f():
    while True:
        print('x' * 10000)
        sys.stderr.write('x' * 10000)
"""
    assert attack(functions, source, time_s=0.5) == [CallResult(None, "Timeout")]


def test_endless_results_are_cut_at_the_limit(functions: FunctionPool) -> None:
    source = """
import os
def f():
    while True:
        for fd in range(3, 64):
            try:
                os.write(fd, b'v1\\n' * 100000)
            except OSError:
                pass
"""
    results = attack(functions, source, time_s=2.0, output_bytes=100_000)
    assert len(results) == 1


def test_a_memory_bomb_dies_alone(functions: FunctionPool) -> None:
    bombs = {
        "list": "def f():\n    x = []\n    while True:\n        x.append(bytearray(1 << 24))",
        "file": "import os\ndef f():\n    x = [os.memfd_create('x') for _ in range(40)]\n"
        "    return sum(os.write(fd, bytes(1 << 26)) for fd in x)",
    }
    assert attack(functions, bombs["list"], memory_mb=256) == [CallResult(None, "MemoryError")]
    written = attack(functions, bombs["file"], memory_mb=256, output_bytes=1 << 20)[0]
    assert written.value is None or int(written.value) <= 40 << 20


def test_kill_everything_kills_only_its_own(functions: FunctionPool) -> None:
    source = "import os, signal\ndef f():\n    os.kill(-1, signal.SIGKILL)\n    return 1"
    attack(functions, source)


@pytest.mark.parametrize("pid", ["os.getppid()", "0", "1", "2", "-1"])
def test_signals_do_not_leave_the_sandbox(functions: FunctionPool, pid: str) -> None:
    attack(functions, f"import os, signal\ndef f():\n    os.kill({pid}, signal.SIGKILL)\n    return 1")


def test_a_daemon_does_not_outlive_its_run(functions: FunctionPool) -> None:
    source = """
import os, time
def f():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(600)
        os._exit(0)
    return 1
"""
    assert attack(functions, source) == [CallResult("1")]


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_VSOCK", "AF_ALG"])
def test_there_are_no_sockets(functions: FunctionPool, family: str) -> None:
    source = f"import socket\ndef f(): return socket.socket(socket.{family}, socket.SOCK_STREAM)"
    assert attack(functions, source) == [CallResult(None, "PermissionError")]


def test_the_network_is_empty_even_without_the_system_call_filter(functions: FunctionPool) -> None:
    source = "import socket\ndef f(): return socket.if_nameindex()"
    assert attack(functions, source)[0].value in (None, encode([(1, "lo")]))


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/1/environ", "/proc/self/maps", "/sys", "/root/.ssh", "/home", "/run"]
)
def test_the_host_cannot_be_read(functions: FunctionPool, path: str) -> None:
    source = "import os\ndef f(p): return os.listdir(p) if os.path.isdir(p) else open(p, 'rb').read()"
    assert attack(functions, source, path)[0].value is None


def test_only_the_interpreter_lies_in_the_sandbox(functions: FunctionPool) -> None:
    source = """
import os
def f():
    return [os.path.join(d, n) for d, _, names in os.walk('/') for n in names if not n.endswith(('.py', '.pyc', '.so'))]
"""
    run = FunctionRun(source, "f", ("[]",), Limits(time_s=120.0, call_s=30.0))
    found = decode(functions.run_sync([run])[0][0].value or "")
    assert not [p for p in found if "site-packages" in p or p.endswith((".whl", ".pem", ".toml", ".git"))]
    assert "/etude/shared/sandbox/inside" not in found


def test_third_party_code_cannot_be_imported(functions: FunctionPool) -> None:
    for module in ("msgspec", "numpy", "pip", "setuptools", "services", "etude"):
        results = attack(functions, f"import {module}\ndef f(): return 1")
        assert results == [CallResult(None, "ModuleNotFoundError")], module


@pytest.mark.parametrize(
    "path", ["/x", "/tmp/x", "/dev/x", "/dev/shm/x", "/etude/x", "/etude/shared/sandbox/inside/harness.py"]
)
def test_nothing_can_be_written(functions: FunctionPool, path: str) -> None:
    results = attack(functions, "def f(p):\n    with open(p, 'w') as file:\n        return file.write('x')", path)
    assert results[0].value is None


def test_the_interpreter_on_the_host_stays_as_it_is(functions: FunctionPool) -> None:
    path = Path(os.__file__)
    before = path.read_bytes()
    for how in ("open(p, 'a').write('#')", "os.unlink(p)", "os.rename(p, p + '2')", "os.chmod(p, 0o777)"):
        assert attack(functions, f"import os\ndef f(p): return {how}", str(path))[0].value is None
    assert path.read_bytes() == before


def test_an_early_exit_with_status_zero_passes_nothing(functions: FunctionPool) -> None:
    assert attack(functions, "import os\ndef f(): os._exit(0)") == [CallResult(None, "Died")]
    assert attack(functions, "import os\nos._exit(0)") == [CallResult(None, "Died")]


PATIENT = Limits(time_s=120.0, call_s=60.0)  # for what is no attack, on a machine that is busy
BROKEN = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'bno sandbox here')
    except OSError:
        pass
os._exit(125)
"""


def test_a_candidate_cannot_say_that_its_sandbox_broke(functions: FunctionPool) -> None:
    """It would get no verdict, and neither would those that are graded with it."""
    runs = [
        FunctionRun(source=BROKEN, entry="f", args=("[]",)),
        FunctionRun("def f(): return 7", "f", ("[]",), PATIENT),
    ]
    forged, innocent = functions.run_sync(runs)
    assert forged[0].value is None
    assert innocent == [CallResult("7")]


def test_text_on_standard_output_is_no_result(functions: FunctionPool) -> None:
    source = "import os\ndef f():\n    os.write(1, b'v1\\n')\n    os.write(2, b'v1\\n')\n    os._exit(0)"
    assert attack(functions, source) == [CallResult(None, "Died")]


FORGE = """
import os
def f(x):
    for fd in range(3, 64):
        try:
            os.write(fd, b'v%d\\n' * 3)
        except OSError:
            pass
    os._exit(0)
"""


def test_forged_results_are_worth_no_more_than_returned_values(functions: FunctionPool) -> None:
    """The candidate owns its process, so it can write any result. It never held an expected one: a forged guess is right
    exactly when returning the same guess would be."""
    expected = [encode(x * x) for x in (3, 4)]
    forged = attack(functions, FORGE % 9, 3, 4)
    returned = attack(functions, "def f(x): return 9", 3, 4)
    assert [r.value for r in forged] == [r.value for r in returned]
    assert [equal(r.value or "", e) for r, e in zip(forged, expected, strict=True)] == [True, False]


def test_nothing_expected_is_in_the_memory_of_the_candidate(functions: FunctionPool) -> None:
    """Neither the request of an earlier run nor anything of the caller's: the nursery never reads what it passes on."""
    secret = "".join(["qu", "artz-", "sphinx"])
    functions.run_sync([FunctionRun(f"def f(x): return {secret!r}", "f", (encode([secret]),), HONEST.limits)])
    source = """
import gc, sys
def f(parts):
    word = ''.join(parts)
    return sum(word in o for o in gc.get_objects() if type(o) is str) + sum(
        word in repr(m.__dict__) for m in list(sys.modules.values()) if m.__name__ != 'candidate')
"""
    assert value(attack(functions, source, ["qu", "artz-", "sphinx"])) == 0


def test_objects_equal_to_everything_are_not_values(functions: FunctionPool) -> None:
    source = """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
    def __repr__(self): return '42'
def f(): return Any(1)
"""
    assert attack(functions, source) == [CallResult(None, "Unprintable")]


def test_overridden_builtins_spoil_only_their_own_results(functions: FunctionPool) -> None:
    source = """
import builtins
builtins.type = lambda *a: int
builtins.isinstance = lambda *a: True
builtins.len = lambda x: 0
builtins.ValueError = builtins.TypeError = RuntimeError
def f(): return [1, 2]
"""
    results = attack(functions, source)
    assert results[0].value is None or not equal(results[0].value, "true")


def test_patched_timers_do_not_outlast_the_deadline(functions: FunctionPool) -> None:
    source = """
import signal, time
signal.setitimer(signal.ITIMER_PROF, 0)
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
signal.setitimer = time.sleep = time.time = time.monotonic = time.perf_counter = lambda *a: 0
def f():
    while True:
        pass
"""
    assert attack(functions, source, time_s=0.5) == [CallResult(None, "Timeout")]


@pytest.mark.parametrize(
    "call",
    [
        "libc.unshare(0x10000000)",  # a user namespace
        "libc.unshare(0x00020000)",
        "libc.mount(b'none', b'/dev', b'tmpfs', 0, None)",
        "libc.ptrace(0, 0, 0, 0)",
        "libc.setuid(0)",
        "libc.chroot(b'/')",
        "libc.shmget(1, 4096, 0o1666)",
        "libc.fcntl(libc.open(b'/etude/shared/problems/values.py', 0), 1024, 1)",  # a lease
        "libc.socketpair(1, 2, 0, ctypes.create_string_buffer(8))",  # a datagram can be sent to an abstract name
        "libc.socketpair(40, 1, 0, ctypes.create_string_buffer(8))",  # AF_VSOCK
        "libc.klogctl(10, 0, 0)",  # the size of the kernel's log
        "libc.flock(libc.open(b'/etude/shared/problems/values.py', 0), 6)",  # seen by every other sandbox
        "libc.inotify_init1(0)",
        "libc.syscall(321, 0, 0, 0)",  # bpf
        "libc.syscall(425, 8, 0)",  # io_uring_setup
        "libc.syscall(435, 0, 0)",  # clone3
        "libc.syscall(56, 0x10000011, 0, 0, 0, 0)",  # clone into a user namespace
        "libc.syscall(0x40000000 + 39)",  # getpid by the x32 table
        "libc.prctl(23, 21, 0, 0, 0) - 1",  # CAP_SYS_ADMIN in the bounding set: may be, see the next
        "libc.syscall(126, struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[1 << 21] * 6))",  # capset
    ],
)
def test_ctypes_reaches_no_privilege(functions: FunctionPool, call: str) -> None:
    if os.uname().machine != "x86_64" and "syscall" in call:
        pytest.skip("system call numbers of x86_64")
    source = f"import ctypes, struct\nlibc = ctypes.CDLL(None, use_errno=True)\ndef f(): return {call}"
    assert value(attack(functions, source)) in ((-1, 0) if "prctl" in call else (-1,))


def test_a_system_call_that_no_program_needs_is_refused_whatever_it_does(functions: FunctionPool) -> None:
    """Every number but those of the list: also calls that a kernel to come will have."""
    looked_at = {number for name, number in confine._CALLS[confine.MACHINE].items() if name in ("clone", "fcntl")}
    if confine.MACHINE == "x86_64":
        looked_at |= {
            335,
            336,
        }  # the kernel's own returns from probes: no filter sees them, and called from elsewhere they kill
    others = sorted(set(range(600)) - set(NEEDED[confine.MACHINE].values()) - looked_at)
    source = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def f():
    passed = []
    for number in {others}:
        if libc.syscall(number, -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
            passed.append(number)
    return passed
"""
    assert value(attack(functions, source)) == []


def test_an_event_loop_still_runs(functions: FunctionPool) -> None:
    """It wakes itself by a pair of sockets."""
    source = "import asyncio\nasync def g(): return await asyncio.to_thread(int, '5')\ndef f(): return asyncio.run(g())"
    assert attack(functions, source) == [CallResult("5")]


def test_a_chain_of_processes_has_the_processor_time_of_one_run(functions: FunctionPool) -> None:
    source = """
import os, time
def f():
    for _ in range(5):
        if (pid := os.fork()):
            os.waitpid(pid, 0)
            os._exit(0)
        end = time.process_time() + 0.7
        while time.process_time() < end:
            pass
    return 'all of it'
"""
    assert attack(functions, source, cpu_s=1.0) == [CallResult(None, "CpuLimit")]


def test_a_crash_in_native_code_is_an_error_of_the_candidate(functions: FunctionPool) -> None:
    assert attack(functions, "import ctypes\ndef f(): ctypes.string_at(0)") == [CallResult(None, "Died")]
    deep = "import sys\nsys.setrecursionlimit(10**9)\ndef f(x=0): return [f(x + 1)]"
    assert attack(functions, deep, memory_mb=64)[0].value is None


@pytest.mark.parametrize("body", ["'x' * (1 << 28)", "[0] * (1 << 24)", "1 << (1 << 30)", "x"])
def test_huge_and_endless_values_are_errors(functions: FunctionPool, body: str) -> None:
    source = f"def f():\n    x = []\n    x.append(x)\n    return {body}"
    assert attack(functions, source)[0].value is None


def test_a_hidden_origin_is_gone_from_the_disk_for_its_run_only(functions: FunctionPool) -> None:
    """Its file, its bytecode and its package directory; the next run finds them again."""
    source = """
import glob, os, string
def f(names):
    base = os.path.dirname(string.__file__)
    paths = [p for n in names for p in glob.glob(base + '/' + n)]
    return [os.path.isdir(p) and len(os.listdir(p)) or not os.path.isdir(p) and len(open(p, 'rb').read(9)) for p in paths]
"""
    names = ["colorsys.py", "__pycache__/colorsys.*", "json"]
    run = FunctionRun(source, "f", (encode([names]),), Limits(time_s=120.0), forbidden_imports=("colorsys", "json"))
    open_run = FunctionRun(source, "f", (encode([names]),), Limits(time_s=120.0))
    hidden, seen = (decode(r[0].value or "") for r in functions.run_sync([run, open_run]))
    assert not any(hidden)
    assert all(seen)


@pytest.mark.parametrize(
    ("origin", "body"),
    [
        ("posixpath", "__import__('os').path.join('a', 'b')"),
        ("posixpath", "__import__('sys').modules['os.path'].join('a', 'b')"),
        ("posixpath", "__import__('os.path').path.join('a', 'b')"),
        ("genericpath", "__import__('os').path.commonprefix(['ab', 'ac'])"),
        ("genericpath", "__import__('posixpath').commonprefix(['ab', 'ac'])"),
        ("functools", "__import__('contextlib').wraps(len)(max).__name__"),
        ("heapq", "__import__('_heapq').heappop([1])"),
        (
            "bisect",
            "__import__('shared.sandbox.inside.harness').sandbox.inside.harness._given['bisect'].bisect([1], 2)",
        ),
        ("bisect", "__import__('__main__').harness._given['bisect'].bisect([1], 2)"),
        ("bisect", "__import__('sys')._getframe(1).f_globals['_given']['bisect'].bisect([1], 2)"),
        ("json", "__import__('shared.problems.values').problems.values.json.dumps(1)"),
        ("json", "__import__('sys').modules['shared.problems.values']._quote('a')"),
    ],
)
def test_an_origin_is_reached_by_no_import_and_no_name(functions: FunctionPool, origin: str, body: str) -> None:
    run = FunctionRun(f"def f(): return {body}", "f", ("[]",), HONEST.limits, forbidden_imports=(origin,))
    (result,) = functions.run_sync([run])[0]
    assert result.value is None
    assert result.error in ("AttributeError", "KeyError", "ModuleNotFoundError")


def test_a_run_works_whatever_module_of_the_interpreter_is_its_origin(functions: FunctionPool) -> None:
    """The harness needs some of them itself."""
    source = "import sys\ndef f(): return sorted({m.__name__.partition('.')[0] for m in sys.modules.values()})"
    tops = value(functions.run_sync([FunctionRun(source, "f", ("[]",), HONEST.limits)])[0])
    assert isinstance(tops, list)
    assert {"json", "re", "functools", "os"} <= set(tops)
    source = "def f(x): return [sorted(x), {'a', 1.5}, b'x', None]"
    runs = [
        FunctionRun(source, "f", ("[[2, 1]]", "[3]"), HONEST.limits, forbidden_imports=(top,))
        for top in tops
        if not top.startswith("_")
    ]
    for run, results in zip(runs, functions.run_sync(runs), strict=True):
        assert results[0].value == encode([[1, 2], {"a", 1.5}, b"x", None]), run.forbidden_imports
        assert results[1] == CallResult(None, "TypeError"), run.forbidden_imports


def test_text_that_steers_a_terminal_is_no_value(functions: FunctionPool) -> None:
    source = """
import os
def f(text):
    for fd in range(3, 64):
        try:
            os.write(fd, b'v' + text + b'\\n')
        except OSError:
            pass
    os._exit(0)
"""
    for text in (b"\x1b]0;pwned\x07", b"\x7f", b"1\r", "\u202e".encode()):
        assert attack(functions, source, text) == [CallResult(None, "Error")], text
    plain = "".join(map(chr, range(0x20000 >> 4)))  # what control characters a value has, its text spells out
    assert value(attack(functions, "def f(x): return x", plain)) == plain


def test_a_run_of_a_problem_has_a_few_processes_and_threads_at_most(functions: FunctionPool) -> None:
    """Each could take the problem's memory."""
    source = """
import os, time, threading
def f(how):
    for n in range(100):
        try:
            if how == 'thread':
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            elif os.fork() == 0:
                time.sleep(60)
        except (BlockingIOError, RuntimeError):
            return n
"""
    problem = FunctionProblem(id="p", files={"a.py": source}, entry="f", visible=[Case(args="[]", expected="1")])
    for how in ("process", "thread"):
        run = run_of(problem, problem.files, [Case(args=encode([how]), expected="1")], stop_at_error=False)
        # Threads reserve address space: at the usual limit it may end before their number does.
        run = replace(run, limits=replace(run.limits, time_s=60.0, call_s=5.0, memory_mb=4096))
        assert value(functions.run_sync([run])[0]) == PROCESSES - 2


def test_the_sandbox_goes_with_its_owner() -> None:
    """A killed worker leaves no nursery behind."""
    code = """
import sys, time
from shared.sandbox import FunctionRun, Limits, connect
pool = connect("bubblewrap", 1)
pool.run_sync([FunctionRun("def f(): return 1", "f", ("[]",), Limits(time_s=60.0))])
print("ready", flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    sandbox = psutil.Process(owner.pid).children(recursive=True)
    assert sandbox
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(sandbox, timeout=patient(30))
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_the_candidate_is_nobody_on_the_host(functions: FunctionPool) -> None:
    if os.geteuid() != 0:
        pytest.skip("as an ordinary user the sandbox keeps that user's id, behind a user namespace")
    functions.run_sync([HONEST])

    def inside() -> list[int]:
        """The uids of what runs in the nurseries; sandboxes of agents, which earlier tests may have left warm, have others."""
        uids = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if nursery.__name__ in child.cmdline():
                    uids += [p.uids().real for p in child.children(recursive=True) if p.name().startswith("python")]
        return uids

    # A nursery that just starts, say after an earlier test's attack, is root until it enters its namespace.
    until(lambda: min(inside(), default=0) >= bubblewrap.FIRST_UID, "sandboxes to be nobody on the host")
