"""System calls that a sandbox for agents must not have: tracing, namespaces, mounts, parts of the kernel with a history of holes.

Each is tried with harmless arguments: the kernel checks permissions first, so that any error but a refusal means that the call is
there to be used. All have to be there in the naive sandbox, where root runs it.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sandbox_attacks import ROOT, Attack, World, adapters, attempt, named, world_of

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="system call numbers of x86_64")

TRIED = "r = call(%s)\nif not refused(r): hole(r)\n"


def built_in(path: str) -> bool:
    return Path(path).exists()


def tried(name: str, call: str, *, after: str = "", able: bool = ROOT) -> Attack:
    return Attack(name, TRIED % call + after, python=True, able=able)


# Whether this kernel has the system calls of x32: its getpid answers.
_X32 = ctypes.CDLL(None).syscall(0x40000000 + 39) > 0
CALLS = [
    # Tracing. PTRACE_SEIZE stops nobody.
    tried("trace the loop", "101, 0x4206, @loop_pid@, 0, 0", after="call(101, 17, @loop_pid@, 0, 0)"),
    tried("read the memory of the loop", "310, @loop_pid@, b'\\0' * 16, 1, b'\\0' * 16, 1, 0"),
    tried("write the memory of the loop", "311, @loop_pid@, b'\\0' * 16, 1, b'\\0' * 16, 1, 0"),
    tried("take a descriptor of the loop", "438, call(434, @loop_pid@, 0), 0, 0"),
    tried(
        "compare with the loop",
        "312, @loop_pid@, os.getpid(), 0, 0, 0",
        able=ROOT and built_in("/proc/self/timens_offsets"),
    ),
    # Namespaces and mounts. The flags of the first five are whole; those after them stop at an argument.
    tried("unshare a user namespace", "272, 0x10000000"),
    tried("unshare mounts", "272, 0x20000"),
    tried("unshare all others", "272, 0x6e000000"),
    tried("clone into a user namespace", "56, 0x10000011, 0, 0, 0, 0", after="if r == 0: os._exit(0)"),
    tried(
        "clone3 into a user namespace",
        "435, struct.pack('11Q', 0x10000000, *[0] * 3, 17, *[0] * 6), 88",
        after="if r == 0: os._exit(0)",
    ),
    tried("setns", "308, os.open('/proc/self/ns/mnt', 0), 0x20000"),
    tried("mount", "165, b'none', b'/proc/none', b'tmpfs', 0, None"),
    tried("umount", "166, b'/proc/none', 2"),
    tried("pivot_root", "155, b'/proc/none', b'/proc/none'"),
    tried("chroot", "161, b'/'"),
    tried("open_tree", "428, -100, b'/', 0x80001"),
    tried("fsopen", "430, b'tmpfs', 0"),
    tried("mount_setattr", "442, -100, b'/proc/none', 0, b'\\0' * 32, 32"),
    tried("fsconfig", "431, -1, 0, 0, 0, 0"),
    # Files by handle: a way around every mount.
    tried("open_by_handle_at", "304, -100, struct.pack('II8s', 8, 1, b''), 0"),
    tried("fanotify_init", "300, 4, 0"),
    # Parts of the kernel with a history of holes.
    tried("bpf", "321, 99, 0, 0"),
    tried("bpf map", "321, 0, struct.pack('4I', 2, 4, 4, 1) + bytes(112), 128"),
    tried("perf_event_open", "298, struct.pack('IIQ', 1, 128, 0) + bytes(112), 0, -1, -1, 0"),
    tried("userfaultfd", "323, 1", able=True),
    tried("io_uring_setup", "425, 1, bytes(120)", able=True),
    tried("keyctl", "250, 0, -4, 1", able=True),
    tried("add_key", "248, b'user', b'etude-@token@', b'x', 1, -2", able=True),
    tried("request_key", "249, b'user', b'etude-none', None, -2", able=True),
    tried("kexec_load", "246, 0, 0, None, 0xffff", able=ROOT and built_in("/sys/kernel/kexec_loaded")),
    tried("reboot", "169, 0, 0, 0, None"),
    tried("init_module", "175, None, 0, None", able=ROOT and built_in("/proc/modules")),
    tried("delete_module", "176, b'etude-none', 0x800", able=ROOT and built_in("/proc/modules")),
    tried("log of the kernel", "103, 3, ctypes.create_string_buffer(64), 64"),
    tried("swapon", "167, b'/proc/none', 0"),
    tried("acct", "163, b'/proc/none'"),
    # Which user and which powers.
    Attack("become root", "if call(105, 0) == 0 or call(106, 0) == 0: hole()", python=True, able=ROOT),
    Attack(
        "become another user", "if call(117, 1, 1, 1) == 0 or call(119, 1, 1, 1) == 0: hole()", python=True, able=ROOT
    ),
    Attack(
        "give a file away",
        "open('given', 'w').close()\nif call(92, b'given', 1, 1) == 0: hole()",
        python=True,
        able=ROOT,
    ),
    Attack(
        "capabilities",
        "for line in slurp('/proc/self/status').decode().splitlines():\n"
        "    if line.startswith(('CapEff', 'CapPrm', 'CapInh', 'CapAmb')) and int(line.split()[1], 16): hole(line)",
        python=True,
        able=ROOT,
    ),
    Attack(
        "powers of set-user-id programs",
        "if 'NoNewPrivs:\\t1' not in slurp('/proc/self/status').decode(): hole()",
        python=True,
    ),
    Attack("no filter", "if 'Seccomp:\\t2' not in slurp('/proc/self/status').decode(): hole()", python=True),
    Attack(
        "su and sudo",
        "for p in su sudo mount pkexec; do $p -c true 2>/dev/null </dev/null && echo HOLE; done",
        able=ROOT,
    ),
    # Around a filter: the 32-bit calls of the same process, and those of x32.
    Attack(
        "32-bit system calls",
        """
import mmap
# mov eax, 310 (unshare); mov ebx, 0x10000000; int 0x80; ret
code = bytes.fromhex('b836010000' 'bb00000010' 'cd80' 'c3')
page = mmap.mmap(-1, 4096, prot=7)
page.write(b'\\x53' + code[:-1] + b'\\x5b\\xc3')  # rbx belongs to the caller
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
if function() == 0: hole()
""",
        python=True,
        able=ROOT and built_in("/proc/sys/abi/vsyscall32"),
    ),
    tried("x32 system calls", "0x40000000 + 272, 0x10000000", able=_X32),
    # Personalities: PER_LINUX32 and READ_IMPLIES_EXEC gain nothing unless a filter or a limit depends on them.
    Attack(
        "personality and then a namespace",
        "call(135, 0x0440008)\nr = call(272, 0x10000000)\nif not refused(r): hole(r)",
        python=True,
        able=ROOT,
    ),
    Attack(
        "push keys into a terminal",
        """
import fcntl, termios
paths = ['/dev/tty', '/dev/console', '/dev/tty0', '/dev/tty1'] + ['/proc/self/fd/%d' % fd for fd in range(4096) if os.isatty(fd)]
for path in paths:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        continue
    hole(path)  # opened is enough: TIOCSTI is a matter of the kernel's setting
""",
        python=True,
    ),
    Attack(
        "raise a limit",
        """
import resource
for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO):
    hard = resource.getrlimit(what)[1]
    if hard == resource.RLIM_INFINITY or what == resource.RLIMIT_NOFILE and hard > 1 << 17:
        hole(what)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -5)
        hole('priority')
    except OSError:
        pass
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    hole('realtime')
except OSError:
    pass
""",
        python=True,
        able=ROOT,
    ),
]


@pytest.fixture(scope="module")
def naive() -> Iterator[World]:
    with world_of("naive") as world:
        yield world


@pytest.fixture(scope="module", params=adapters())
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as world:
        yield world


@named(CALLS)
def test_a_call_is_there_in_the_naive_sandbox(naive: World, attack: Attack) -> None:
    if not attack.able:
        pytest.skip("this host cannot show it")
    assert attempt(naive, attack)


@named(CALLS)
def test_a_call_is_refused(world: World, attack: Attack) -> None:
    assert not attempt(world, attack)
