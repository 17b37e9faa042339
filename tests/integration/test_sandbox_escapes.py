"""Ways out of a sandbox for agents: the network, and the files, processes and settings of the host.

Each attack is tried twice: in the naive sandbox, where it has to succeed, and in every adapter, where it must not.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sandbox_attacks import (
    ROOT,
    Attack,
    World,
    adapters,
    attempt,
    named,
    told_secret,
    world_of,
)


def _routed(address: str) -> bool:
    """Return whether this host has a way to an address. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 80))
        except OSError:
            return False
    return True


def _address() -> str:
    """Return an address of this host that is not its loopback; empty: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 80))
        except OSError:
            return ""
        found = str(probe.getsockname()[0])
        return "" if found.startswith("127.") else found


def _ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


def connect(family: str, target: str) -> str:
    return f"s = socket.socket(socket.{family})\ns.settimeout(5)\ns.connect({target})\nhole({target})"


def route(address: str) -> str:
    """A datagram socket only looks for a route: nothing is sent."""
    return f"s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.connect(('{address}', 80))\nhole()"


def saw_the_interfaces(world: World, output: bytes) -> bool:
    ours = {name for _, name in socket.if_nameindex()} - {"lo"}
    return bool(ours & set(output.decode().split()))


def saw_the_port(world: World, output: bytes) -> bool:
    return f":{int(world.targets['port']):04X} ".encode() in output


NETWORK = [
    Attack("loopback", connect("AF_INET", "('127.0.0.1', @port@)"), python=True),
    Attack("loopback of IPv6", connect("AF_INET6", "('::1', @port6@)"), python=True, able=_ipv6()),
    Attack("any address", connect("AF_INET", "('0.0.0.0', @port@)"), python=True),
    Attack("address of the host", connect("AF_INET", f"('{_address()}', @port@)"), python=True, able=bool(_address())),
    Attack("metadata address", route("169.254.169.254"), python=True, able=_routed("169.254.169.254")),
    Attack("internet", route("198.51.100.7"), python=True, able=_routed("198.51.100.7")),
    Attack("abstract socket", connect("AF_UNIX", "'\\0etude-@token@'"), python=True),
    Attack("docker socket", connect("AF_UNIX", "'@folder@/docker.sock'"), python=True),
    Attack(
        "every socket that the kernel lists",
        """
for line in slurp('/proc/net/unix').decode().splitlines()[1:]:
    name = line.split(' ')[-1]
    if '@token@' in name or 'docker.sock' in name:
        s = socket.socket(socket.AF_UNIX)
        try:
            s.connect(name.replace('@', '\\0', 1) if name.startswith('@') else name)
            hole(name)
        except OSError:
            pass
""",
        python=True,
    ),
    Attack(
        "interfaces by netlink",
        "print(*[name for _, name in socket.if_nameindex()])",
        python=True,
        succeeded=saw_the_interfaces,
    )
    if len(socket.if_nameindex()) > 1
    else Attack("interfaces by netlink", ":", able=False),
    Attack("listeners in /proc/net", "cat /proc/net/tcp /proc/net/tcp6 /proc/1/net/tcp", succeeded=saw_the_port),
    Attack(
        "raw packets",
        """
for family, kind in ((17, 3), (2, 3), (10, 3)):
    try:
        socket.socket(family, kind, 1)
        hole(family)
    except OSError:
        pass
""",
        python=True,
        able=ROOT,
    ),
    Attack(
        "families without a namespace",
        """
for family in (40, 38, 31, 44):
    for kind in (1, 2, 5):
        try:
            socket.socket(family, kind)
            hole(family)
        except OSError:
            pass
""",
        python=True,
        able=Path("/dev/vsock").exists() or Path("/proc/sys/net/vsock").exists() or Path("/sys/module/vsock").exists(),
    ),
]

# Where a process of the host is looked for by its number, and again under every number that is seen.
_EVERY = "for p in [@worker@, @loop_pid@, *processes()]:\n"


def digest(path: str) -> str:
    """Return a digest of a file, or of the names in a folder, as the attacks make it; empty: it cannot be read, or is empty."""
    try:
        if os.path.isdir(path):
            data = "\n".join(sorted(os.listdir(path))).encode()
        else:
            with open(path, "rb") as file:
                data = file.read(1 << 16)
    except OSError:
        return ""
    return hashlib.sha256(data).hexdigest() if data else ""


def read(path: str) -> Attack:
    """Read what lies there on the host. Its digest is compared: the sandbox may have something else of that name."""
    script = f"""
import hashlib
path = {path!r}
data = '\\n'.join(sorted(os.listdir(path))).encode() if os.path.isdir(path) else slurp(path, 1 << 16)
print(hashlib.sha256(data).hexdigest())
"""
    there = digest(path)
    return Attack(
        f"read {path}",
        script,
        python=True,
        # As it is now, too: programs of the host come and go, and their files in /run with them.
        succeeded=lambda world, output: (
            bool(there) and any(one.encode() in output for one in {there, digest(path)} if one)
        ),
        able=bool(there),
    )


FILES = [
    *map(
        read,
        (
            "/etc/shadow",
            "/etc/gshadow",
            "/etc/machine-id",
            "/etc/hosts",
            "/root",
            "/root/.ssh",
            "/home",
            "/var/lib",
            "/var/log",
        ),
    ),
    *map(
        read,
        ("/proc/1/environ", "/proc/1/cmdline", "/run", "/sys/fs/cgroup", "/sys/class/net", "/boot", "/mnt", "/srv"),
    ),
    Attack("environment of the worker", "env; cat /proc/self/environ /proc/$PPID/environ", succeeded=told_secret),
    Attack("a file of the host", "cat @folder@/secret", succeeded=told_secret),
    Attack(
        "environments of all", _EVERY + "    print(slurp('/proc/%d/environ' % p))", python=True, succeeded=told_secret
    ),
    Attack(
        "roots of all",
        _EVERY + "    print(slurp('/proc/%d/root@folder@/secret' % p))",
        python=True,
        succeeded=told_secret,
    ),
    Attack(
        "work folders of all",
        _EVERY + "    print(slurp('/proc/%d/cwd/../secret' % p))",
        python=True,
        succeeded=told_secret,
    ),
    Attack(
        "descriptors of all",
        _EVERY
        + """
    for fd in descriptors(p):
        if os.path.realpath(fd).endswith('/secret'):
            print(slurp(fd))
""",
        python=True,
        succeeded=told_secret,
    ),
    Attack(
        "inherited descriptors",
        """
for fd in range(3, 4096):
    try:
        os.lseek(fd, 0, 0)
        print(os.read(fd, 4096))
    except OSError:
        pass
""",
        python=True,
        succeeded=told_secret,
    ),
    Attack("an inherited terminal", "for fd in range(4096):\n    if os.isatty(fd):\n        hole(fd)", python=True),
    Attack(
        "memory of the worker",
        """
for line in slurp('/proc/@loop_pid@/maps').decode().splitlines()[:1]:
    start = int(line.split('-')[0], 16)
    with open('/proc/@loop_pid@/mem', 'rb') as file:
        file.seek(start)
        hole(file.read(4))
""",
        python=True,
        able=ROOT,
    ),
    Attack(
        "devices of the host",
        """
import glob
names = 'mem kmem port kmsg kvm fuse loop-control uinput net/tun vhost-net snapshot hwrng'.split()
for path in ['/dev/' + name for name in names] + glob.glob('/dev/[svx]d*') + glob.glob('/dev/nvme*') + glob.glob('/dev/loop*'):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        hole(path)
    except OSError:
        pass
""",
        python=True,
        able=ROOT,
    ),
    Attack(
        "a device made inside",
        """
import stat
characters, blocks = ((1, 1), (1, 11), (10, 200)), ((254, 0), (253, 0), (8, 0))
for kind, number in [(stat.S_IFCHR, n) for n in characters] + [(stat.S_IFBLK, n) for n in blocks]:
    for folder in ('.', '/tmp', '/dev/shm'):
        try:
            path = folder + '/device-@token@'
            os.mknod(path, kind | 0o666, os.makedev(*number))
        except OSError:
            continue
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            hole(number)
        except OSError:
            pass
        finally:
            os.unlink(path)
""",
        python=True,
        able=ROOT,
    ),
    Attack(
        "settings of the kernel",
        """
names = 'kernel/core_pattern kernel/modprobe kernel/sysrq vm/drop_caches vm/overcommit_memory fs/suid_dumpable kernel/hotplug'
for path in ['/proc/sysrq-trigger', '/sys/kernel/uevent_helper', '/sys/power/state', '/proc/sys/fs/binfmt_misc/register'] + [
        '/proc/sys/' + name for name in names.split()]:
    try:
        os.close(os.open(path, os.O_WRONLY))  # opened, never written to
        hole(path)
    except OSError:
        pass
""",
        python=True,
        able=ROOT,
    ),
    Attack(
        "control groups",
        """
for line in open('/proc/mounts'):
    kind, place = line.split()[2], line.split()[1]
    if kind.startswith('cgroup'):
        try:
            os.mkdir(place + '/etude-@token@')
            os.rmdir(place + '/etude-@token@')
            hole(place)
        except OSError:
            pass
        for name in ('release_agent', 'cgroup.procs', 'memory.max', 'memory.limit_in_bytes', 'pids.max', 'devices.allow'):
            try:
                os.close(os.open(place + '/' + name, os.O_WRONLY))
                hole(name)
            except OSError:
                pass
""",
        python=True,
        able=ROOT and "cgroup" in Path("/proc/mounts").read_text(),
    ),
    Attack(
        "a core dump",
        "ulimit -c unlimited 2>/dev/null; ulimit -c; (ulimit -c 1024 && kill -SEGV $BASHPID); [ $(ulimit -Hc) = 0 ] || echo HOLE",
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


@named([*NETWORK, *FILES])
def test_an_attack_succeeds_in_the_naive_sandbox(naive: World, attack: Attack) -> None:
    if not attack.able:
        pytest.skip("this host cannot show it")
    assert attempt(naive, attack)


@named([*NETWORK, *FILES])
def test_an_attack_fails(world: World, attack: Attack) -> None:
    assert not attempt(world, attack)
