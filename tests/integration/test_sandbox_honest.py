"""Honest programs run in a function sandbox as they do outside: whatever of the standard library needs no file, network or machine.

Its system calls are those that the filter has to let pass (shared/sandbox/inside/needed_calls.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from shared.sandbox import FunctionRun, Limits, connect, tagged
from shared.sandbox.pool import FunctionPool

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")

# Name -> (body of f, which returns the value, the value).
PROGRAMS: dict[str, tuple[str, object]] = {
    "threads and locks": (
        """
import threading
found, lock = [], threading.Lock()
def add(n):
    with lock:
        found.append(n)
threads = [threading.Thread(target=add, args=(n,)) for n in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
done = threading.Event()
threading.Timer(0.01, done.set).start()
return [sorted(found), done.wait(20)]
""",
        [[0, 1, 2, 3, 4, 5], True],
    ),
    "a pool of threads, queues and conditions": (
        """
import queue
from concurrent.futures import ThreadPoolExecutor
q = queue.Queue()
with ThreadPoolExecutor(4) as pool:
    pool.submit(lambda: q.put('told'))
    return [list(pool.map(lambda n: n * n, range(5))), q.get(timeout=20)]
""",
        [[0, 1, 4, 9, 16], "told"],
    ),
    "an event loop": (
        """
import asyncio
async def main():
    queue = asyncio.Queue()
    async def produce():
        for n in range(3):
            await asyncio.sleep(0.001)
            await queue.put(n)
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(produce())
    found = [await queue.get() for _ in range(3)]
    await task
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 0.01)
    except TimeoutError:
        found.append('late')
    found.append(await loop.run_in_executor(None, int, '7'))
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))
    return found
return asyncio.run(main())
""",
        [0, 1, 2, "late", 7],
    ),
    "a loop on each selector": (
        """
import asyncio, selectors
async def main():
    return await asyncio.to_thread(str, 5)
found = []
for kind in (selectors.EpollSelector, selectors.PollSelector, selectors.SelectSelector):
    loop = asyncio.SelectorEventLoop(kind())
    found.append(loop.run_until_complete(main()))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
return found
""",
        ["5", "5", "5"],
    ),
    "a connected pair of sockets": (
        """
import socket
a, b = socket.socketpair()
a.settimeout(20)
b.sendall(b'hello')
b.shutdown(socket.SHUT_WR)
got = a.recv(100), a.recv(1)
a.sendmsg([b'x', b'y'])
kind = a.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
return [got[0].decode(), got[1].decode(), b.recvmsg(10)[0].decode(), kind == socket.SOCK_STREAM, a.getsockname()]
""",
        ["hello", "", "xy", True, ""],
    ),
    "streams of asyncio over a pair": (
        """
import asyncio, socket
async def main():
    a, b = socket.socketpair()
    r1, w1 = await asyncio.open_connection(sock=a)
    r2, w2 = await asyncio.open_connection(sock=b)
    w1.write(b'line\\n')
    await w1.drain()
    line = await r2.readline()
    w1.close(); w2.close()
    return line.decode()
return asyncio.run(main())
""",
        "line\n",
    ),
    "pipes, polls and selectors": (
        """
import os, select, selectors
r, w = os.pipe()
os.set_blocking(r, False)
p = select.poll(); p.register(r, select.POLLIN)
empty = p.poll(0)
os.write(w, b'abc')
with selectors.DefaultSelector() as s:
    s.register(r, selectors.EVENT_READ)
    ready = len(s.select(5))
return [empty, len(p.poll(5)), select.select([r], [], [], 5)[0] == [r], ready, os.read(r, 10).decode(), os.get_blocking(r)]
""",
        [[], 1, True, 1, "abc", False],
    ),
    "children, their ends and signals": (
        """
import os, signal, time
r, w = os.pipe()
if (pid := os.fork()) == 0:
    os.write(w, b'child')
    os._exit(3)
text = os.read(r, 10)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
if (pid := os.fork()) == 0:
    signal.pause()
os.kill(pid, signal.SIGTERM)
killed = os.waitstatus_to_exitcode(os.wait4(pid, 0)[1])
return [text.decode(), code, killed, os.getpgrp() >= 0, os.getsid(0) >= 0]
""",
        ["child", 3, -15, True, True],
    ),
    "another interpreter": (
        """
import subprocess, sys
run = subprocess.run([sys.executable, '-S', '-c', 'print(input()[::-1])'], input='abc', capture_output=True, text=True)
bad = subprocess.Popen([sys.executable, '-S', '-c', 'raise SystemExit(4)'], start_new_session=True).wait()
try:
    subprocess.run([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], timeout=0.2)
except subprocess.TimeoutExpired:
    late = True
return [run.stdout, run.returncode, bad, late]
""",
        ["cba\n", 0, 4, True],
    ),
    "a child of asyncio": (
        """
import asyncio, sys
async def main():
    child = await asyncio.create_subprocess_exec(sys.executable, '-S', '-c', 'print(2 + 3)', stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    return [out.decode(), child.returncode]
return asyncio.run(main())
""",
        ["5\n", 0],
    ),
    "a process of multiprocessing with a pipe": (
        """
import multiprocessing as mp
context = mp.get_context('fork')
here, there = context.Pipe()
process = context.Process(target=lambda: there.send({'n': [1, 2]}))
process.start()
got = here.recv()
process.join()
return [got, process.exitcode]
""",
        [{"n": [1, 2]}, 0],
    ),
    "memory maps": (
        """
import mmap
with mmap.mmap(-1, 3 * mmap.PAGESIZE) as m:
    m.write(b'hello')
    m.seek(0)
    text = m.read(5)
    m.resize(5 * mmap.PAGESIZE)
    m.madvise(mmap.MADV_DONTNEED)
    m.flush()
    return [text.decode(), len(m) == 5 * mmap.PAGESIZE]
""",
        ["hello", True],
    ),
    "a file without a name": (
        """
import os
fd = os.memfd_create('x')
with open(fd, 'r+b') as file:
    file.write(bytes(range(10)))
    file.flush()
    os.fsync(fd); os.fdatasync(fd)
    os.ftruncate(fd, 6)
    os.posix_fallocate(fd, 0, 8)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    other = os.memfd_create('y')
    sent = os.sendfile(other, fd, 0, 8)
    part = bytearray(2)
    read, written = os.preadv(other, [part], 4), os.pwritev(fd, [b'z'], 7)
    return [sent, os.pread(other, 10, 4).hex(), os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_END), os.isatty(fd), read, written]
""",
        [8, "04050000", 8, 8, False, 2, 1],
    ),
    "looking at files": (
        """
import glob, os, pathlib, shutil, stat
home = pathlib.Path(os.__file__)
names = {entry.name for entry in os.scandir(home.parent)}
walked = sum(1 for _ in os.walk(home.parent / 'json'))
mode = stat.S_ISREG(home.stat().st_mode), home.is_dir(), os.path.islink(home), os.access(home, os.R_OK)
usage = shutil.disk_usage('/').total >= 0
return ['json' in names, walked > 0, list(mode), usage, os.path.exists('/etc/passwd'), bool(glob.glob(str(home.parent / 'os*')))]
""",
        [True, True, [True, False, False, True], True, False, True],
    ),
    "no file can be made, and Python says so as ever": (
        """
import os, tempfile
found = []
for act in (lambda: open('/x', 'w'), lambda: os.mkdir('/d'), lambda: os.symlink('a', '/l'), lambda: os.unlink(os.__file__),
            lambda: os.rename(os.__file__, '/y'), lambda: os.chmod(os.__file__, 0o777), lambda: os.utime(os.__file__),
            lambda: tempfile.TemporaryFile()):
    try:
        act()
        found.append('done')
    except OSError as error:
        found.append(type(error).__name__ if error.errno != 30 else 'read-only')
return found
""",
        ["read-only"] * 4 + ["OSError"] + ["read-only"] * 2 + ["FileNotFoundError"],
    ),
    "in memory as a file": (
        """
import io, tempfile, zipfile, tarfile, gzip
with tempfile.SpooledTemporaryFile(max_size=1 << 20) as file:
    with zipfile.ZipFile(file, 'w') as z:
        z.writestr('a', 'text')
    file.seek(0)
    text = zipfile.ZipFile(file).read('a').decode()
buffer = io.BytesIO()
with tarfile.open(fileobj=buffer, mode='w:gz') as tar:
    tar.addfile(tarfile.TarInfo('b'))
buffer.seek(0)
return [text, tarfile.open(fileobj=buffer).getnames(), gzip.decompress(gzip.compress(b'z')).decode()]
""",
        ["text", ["b"], "z"],
    ),
    "numbers": (
        """
import cmath, decimal, fractions, math, statistics
decimal.getcontext().prec = 40
third = str(decimal.Decimal(1) / 3)
return [third, str(fractions.Fraction(6, 4)), math.comb(10, 3), statistics.median([3, 1, 2]), abs(cmath.exp(0)), 7 ** 100 % 11]
""",
        ["0." + "3" * 40, "3/2", 120, 2, 1.0, 1],
    ),
    "chance and hashes": (
        """
import hashlib, hmac, os, random, secrets, uuid, zlib
random.seed(5)
return [random.randrange(10 ** 6) == random.Random(5).randrange(10 ** 6), len(secrets.token_hex(4)), len(os.urandom(5)),
        hashlib.sha256(b'a').hexdigest()[:8], hmac.new(b'k', b'm', 'sha1').hexdigest()[:8], zlib.crc32(b'a'), uuid.uuid4().version,
        len(hashlib.scrypt(b'p', salt=b's', n=4, r=1, p=1, dklen=8)), random.SystemRandom().random() < 1]
""",
        [True, 8, 5, "ca978112", "772b71c8", 3904355907, 4, 8, True],
    ),
    "time": (
        """
import datetime, sched, time, zoneinfo
began = time.monotonic_ns()
time.sleep(0.001)
s = sched.scheduler()
ran = []
s.enter(0.001, 1, ran.append, ('x',))
s.run()
clocks = [time.time(), time.perf_counter(), time.process_time(), time.thread_time(), time.clock_gettime(time.CLOCK_REALTIME)]
info = time.get_clock_info('monotonic').monotonic
return [time.monotonic_ns() > began, ran, all(c > 0 for c in clocks), info, time.gmtime(0).tm_year,
        datetime.date(2024, 2, 29).isoformat(),
        time.strftime('%Y', time.localtime(0)), time.clock_getres(time.CLOCK_MONOTONIC) < 1]
""",
        [True, ["x"], True, True, 1970, "2024-02-29", "1970", True],
    ),
    "signals and timers": (
        """
import signal, threading
found = []
signal.signal(signal.SIGUSR1, lambda *_: found.append('usr1'))
signal.raise_signal(signal.SIGUSR1)
signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
signal.signal(signal.SIGALRM, lambda *_: found.append('alarm'))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
signal.raise_signal(signal.SIGUSR2)
found.append(signal.sigpending() == {signal.SIGUSR2})
found.append(signal.sigwait([signal.SIGUSR2]) == signal.SIGUSR2)
found.append(signal.sigtimedwait([signal.SIGUSR2], 0))
signal.alarm(0)
return found + [signal.getitimer(signal.ITIMER_REAL)[0] == 0]
""",
        ["usr1", "usr1", "alarm", True, True, None, True],
    ),
    "events, descriptors and pidfds": (
        """
import os, select, signal
fd = os.eventfd(3)
value = os.eventfd_read(fd)
copy = os.dup(fd); os.dup2(fd, copy); os.set_inheritable(copy, True)
child = os.fork()
if child == 0:
    signal.pause()
handle = os.pidfd_open(child)
signal.pidfd_send_signal(handle, signal.SIGKILL)
ended = select.select([handle], [], [], 20)[0] == [handle]
os.waitid(os.P_PIDFD, handle, os.WEXITED)
os.close(fd); os.closerange(40, 60)
return [value, ended]
""",
        [3, True],
    ),
    "what a process knows of itself": (
        """
import getpass, os, platform, resource, socket, sys
usage = resource.getrusage(resource.RUSAGE_SELF).ru_utime >= 0
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, cores)
os.sched_yield()
os.umask(os.umask(0o22))
return [usage, len(cores) > 0, os.cpu_count() > 0, os.getuid() == os.geteuid(), os.getgid() == os.getegid(), len(os.getresuid()),
        platform.system(), os.uname().sysname, socket.gethostname(), os.nice(0) >= 0, os.getpriority(os.PRIO_PROCESS, 0) >= 0,
        os.times().user >= 0, isinstance(os.getgroups(), list), os.sysconf('SC_PAGESIZE') > 0, os.getcwd(), os.getppid() >= 0,
        os.sched_getscheduler(0), os.sched_get_priority_max(os.SCHED_OTHER), sys.getswitchinterval() > 0]
""",
        [
            True,
            True,
            True,
            True,
            True,
            3,
            "Linux",
            "Linux",
            "sandbox",
            True,
            True,
            True,
            True,
            True,
            "/",
            True,
            0,
            0,
            True,
        ],
    ),
    "databases, text and patterns": (
        """
import csv, difflib, io, json, re, sqlite3, textwrap, unicodedata
db = sqlite3.connect(':memory:')
db.execute('create table t (n integer)')
db.executemany('insert into t values (?)', [(n,) for n in range(5)])
total = db.execute('select sum(n) from t').fetchone()[0]
rows = list(csv.reader(io.StringIO('a,b\\n1,2')))
return [total, rows, json.loads('[1]'), re.findall('[a-z]+', 'ab 1 cd'), unicodedata.name('é'),
        textwrap.shorten('a b c', 3, placeholder=''),
        difflib.get_close_matches('appel', ['apple'])]
""",
        [10, [["a", "b"], ["1", "2"]], [1], ["ab", "cd"], "LATIN SMALL LETTER E WITH ACUTE", "a b", ["apple"]],
    ),
    "compressing": (
        "import bz2, lzma, zlib\ndata = b'abc' * 1000\nreturn [m.decompress(m.compress(data)) == data for m in (bz2, lzma, zlib)]",
        [True, True, True],
    ),
    "classes, copies and garbage": (
        """
import copy, dataclasses, enum, functools, gc, pickle, typing, weakref
@dataclasses.dataclass(order=True)
class P:
    x: int
    y: list = dataclasses.field(default_factory=list)
class C(enum.IntEnum):
    a = 1
p = P(1, [2])
ref = weakref.ref(p)
q = copy.deepcopy(p)
del p
gc.collect()
return [ref() is None, q == P(1, [2]), pickle.loads(pickle.dumps([1, {2: 3}])), C['a'].value, functools.lru_cache(len)('abc')]
""",
        [True, True, [1, {2: 3}], 1, 3],
    ),
    "contexts, generators and exceptions": (
        """
import contextlib, io, logging, traceback, warnings
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(ZeroDivisionError):
    print('shown')
    1 / 0
logging.basicConfig(stream=out, format='%(message)s', force=True)
logging.warning('careful')
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    warnings.warn('old')
try:
    {}['x']
except KeyError:
    last = traceback.format_exc().splitlines()[-1]
return [out.getvalue(), len(caught), last]
""",
        ["shown\ncareful\n", 1, "KeyError: 'x'"],
    ),
    "deep recursion and large values": (
        """
import sys
sys.setrecursionlimit(5000)
def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)
return [depth(2000), len(bytearray(50_000_000)), sum(range(10 ** 6)), len(str(2 ** 10000))]
""",
        [2000, 50_000_000, 499_999_500_000, 3011],
    ),
    "a fault handler, a trace and a profile": (
        """
import cProfile, faulthandler, io, os, pstats, sys, tracemalloc
fd = os.memfd_create('trace')
with open(fd, 'w+') as file:
    faulthandler.enable(file)
    faulthandler.dump_traceback(file)
    faulthandler.disable()
tracemalloc.start()
kept = [object() for _ in range(100)]
size = tracemalloc.get_traced_memory()[0] > 0
tracemalloc.stop()
profile = cProfile.Profile()
profile.runcall(sorted, [2, 1])
return [size, pstats.Stats(profile, stream=io.StringIO()).total_calls > 0]
""",
        [True, True],
    ),
    "the C library": (
        """
import ctypes
libc = ctypes.CDLL(None)
array = (ctypes.c_int * 3)(3, 1, 2)
order = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
libc.qsort(array, 3, 4, order(lambda a, b: a[0] - b[0]))
return [list(array), libc.abs(-4)]
""",
        [[1, 2, 3], 4],
    ),
}


@pytest.fixture(scope="module")
def functions() -> Iterator[FunctionPool]:
    pool = connect("bubblewrap", workers=1)
    yield pool
    pool.close_sync()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_honest_program_runs(functions: FunctionPool, name: str) -> None:
    body, value = PROGRAMS[name]
    source = "def f():\n" + "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    limits = Limits(time_s=120.0, cpu_s=30.0, call_s=20.0)
    (result,) = functions.run_sync([FunctionRun(source, "f", ("[]",), limits)])[0]
    assert (result.error, result.value) == ("", tagged(value))
