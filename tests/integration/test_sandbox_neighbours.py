"""Other sandboxes of the same worker, and the grader's files in an attacker's own: neither can be reached or changed.

Each attack is tried twice: in the naive sandbox, where it has to succeed, and in every adapter, where it must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.sandbox_attacks import (
    GRADER,
    ROOT,
    Attack,
    World,
    adapters,
    attempt,
    named,
    once,
    python,
    told_secret,
    works,
    world_of,
)

OTHERS = [
    Attack("kill a program of another", "p = victim()\nif p: os.kill(p, 9)", python=True, victim="other"),
    Attack("stop a program of another", "p = victim()\nif p: os.kill(p, 19); hole(p)", python=True, victim="other"),
    Attack(
        "environment of another",
        "print(slurp('/proc/%d/environ' % victim()))",
        python=True,
        victim="other",
        succeeded=told_secret,
    ),
    Attack(
        "memory of another",
        """
p = victim()
for line in slurp('/proc/%d/maps' % p).decode().splitlines():
    if '[stack]' in line:
        first, last = (int(x, 16) for x in line.split()[0].split('-'))
        data = ctypes.create_string_buffer(last - first)
        here = struct.pack('QQ', ctypes.addressof(data), last - first)
        there = struct.pack('QQ', first, last - first)
        call(310, p, here, 1, there, 1, 0)
        print(data.raw)
""",
        python=True,
        victim="other",
        succeeded=told_secret,
    ),
    Attack(
        "trace another",
        "p = victim()\nif p and call(101, 0x4206, p, 0, 0) == 0: hole(p); call(101, 17, p, 0, 0)",
        python=True,
        victim="other",
        able=ROOT,
    ),
    Attack(
        "take a descriptor of another",
        "p = victim()\nif p and (fd := call(434, p, 0)) >= 0 and call(438, fd, 0, 0) >= 0: hole(p)",
        python=True,
        victim="other",
        able=ROOT,
    ),
    Attack("a file in /tmp", "echo HOLE > /tmp/etude-@token@", then="cat /tmp/etude-@token@; rm -f /tmp/etude-@token@"),
    Attack(
        "a file in /var/tmp",
        "echo HOLE > /var/tmp/etude-@token@",
        then="cat /var/tmp/etude-@token@; rm -f /var/tmp/etude-@token@",
    ),
    Attack(
        "a file in /dev/shm",
        "echo HOLE > /dev/shm/etude-@token@",
        then="cat /dev/shm/etude-@token@; rm -f /dev/shm/etude-@token@",
    ),
    Attack(
        "files of another",
        "sleep 0.1; cat ../naive-*/drop-@token@ /proc/*/cwd/drop-@token@ /proc/*/root/*/drop-@token@ 2>/dev/null",
        then="rm -f drop-@token@",
    ),
]
# A program beside the sessions of the same sandbox, say the server of its files: no session may touch it.
OTHERS += [
    replace(attack, name=attack.name.replace("another", "its own sandbox"), victim="mine")
    for attack in OTHERS
    if attack.victim
]
SHARED = """
key = int('@token@') & 0x7fffffff
libc.shmat.restype = ctypes.c_void_p
shm = libc.shmget(key, 4096, 0o1666)
queue = libc.msgget(key, 0o1666)
mq = libc.mq_open(b'/etude-@token@', 0o102, 0o666, None)
"""
LEAVE = SHARED + "libc.msgsnd(queue, struct.pack('l8s', 1, b'message'), 8, 0o4000)\nlibc.mq_send(mq, b'message', 7, 0)"
EXISTING = SHARED.replace("0o1666", "0").replace("0o102", "2")


def left(name: str, leave: str, look: str) -> Attack:
    """Two sandboxes signal to each other by an object of the kernel. Looking removes it."""
    return Attack(f"signal by {name}", leave, python=True, then=python(look))


OTHERS += [
    left(
        "System V memory",
        SHARED,
        EXISTING + "if shm >= 0: hole(libc.shmctl(shm, 0, None), libc.msgctl(queue, 0, None))",
    ),
    left(
        "System V queue",
        LEAVE,
        EXISTING + "if queue >= 0: hole(libc.msgctl(queue, 0, None), libc.shmctl(shm, 0, None))",
    ),
    left(
        "POSIX queue",
        LEAVE,
        EXISTING
        + "if mq >= 0: hole(libc.mq_unlink(b'/etude-@token@'))\nlibc.msgctl(queue, 0, None), libc.shmctl(shm, 0, None)",
    ),
    left(
        "key",
        "call(248, b'user', b'etude-@token@', b'message', 7, -4)",
        "k = call(250, 10, -4, b'user', b'etude-@token@', 0)\nif k > 0: hole(k); call(250, 21, k)",
    ),
]
EVIL = "print('evil')"
CHANGES = [
    ("write", f'echo "{EVIL}" > @grader@/tests.py'),
    ("append", f'echo "{EVIL}" >> @grader@/tests.py'),
    ("remove", "rm -f @grader@/tests.py"),
    ("rename", "mv @grader@/tests.py @grader@/other.py"),
    ("replace", "echo evil > new.py; mv -f new.py @grader@/tests.py"),
    ("add", "echo evil > @grader@/conftest.py"),
    ("change the mode of", "chmod 000 @grader@/tests.py"),
    ("date back", "touch -d 2001-01-01 @grader@/tests.py"),
    ("write through a hard link to", "ln @grader@/tests.py hard && echo evil > hard"),
    ("write through a link to", "ln -s @grader@/tests.py soft; echo evil > soft"),
    ("write through a descriptor of", "exec 9< @grader@/tests.py; echo evil > /proc/self/fd/9"),
    ("move the folder of", "mv @grader@ @grader@-moved && mkdir @grader@ && echo evil > @grader@/tests.py"),
    (
        "mount again and write",
        "mount -o remount,rw,bind @grader@; mount -o remount,rw /; echo evil > @grader@/tests.py",
    ),
    ("unmount and write", "umount -l @grader@; echo evil > @grader@/tests.py"),
    (
        "hide by a mount",
        "mkdir -p e; echo evil > e/tests.py; mount --bind e @grader@ && cat @grader@/tests.py | grep -q evil && echo HOLE",
    ),
    ("hide by a tmpfs", "mount -t tmpfs none @grader@ && [ ! -e @grader@/tests.py ] && echo HOLE"),
    (
        "write as another user to",
        "chown $(id -u) @grader@ @grader@/tests.py; su -c 'echo evil > @grader@/tests.py'; echo evil > @grader@/tests.py",
    ),
]
PRIVILEGED = ("mount again and write", "hide by a mount", "hide by a tmpfs", "change the mode of")


@pytest.fixture(scope="module")
def naive() -> Iterator[World]:
    with world_of("naive") as world:
        yield world


@pytest.fixture(scope="module", params=adapters())
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as world:
        yield world


@named(OTHERS)
def test_an_attack_succeeds_in_the_naive_sandbox(naive: World, attack: Attack) -> None:
    if not attack.able:
        pytest.skip("this host cannot show it")
    _prepare(naive)
    assert attempt(naive, attack)


@named(OTHERS)
def test_an_attack_fails(world: World, attack: Attack) -> None:
    _prepare(world)
    assert not attempt(world, attack)


def _prepare(world: World) -> None:
    world.runner.run(once(world.other, world.text("echo HOLE > drop-@token@")))


def _tampered(world: World) -> bool:
    """Return whether the grader's files are other than they were, on the host or as a later command sees them."""
    session = world.runner.run(world.mine.session())
    seen = world.runner.run(session.run(world.text("cat @grader@/tests.py; ls @grader@"), time_s=20.0))
    assert world.runner.run(works(session))
    world.runner.run(session.close())
    state = _state(world.grader)
    return state != world.targets["grader_state"] or seen.stdout != b"the tests\ntests.py\n"


def _state(folder: Path) -> str:
    files = {
        p.name: (p.read_text(), p.stat().st_mode, p.stat().st_mtime, p.stat().st_uid) for p in sorted(folder.glob("*"))
    }
    return repr((files, sorted(p.name for p in folder.parent.glob("grader*"))))


def _reset(world: World) -> None:
    for path in (*world.grader.glob("*"), *(world.folder / "grader-moved").glob("*")):
        path.unlink()
    if (world.folder / "grader-moved").exists():
        (world.folder / "grader-moved").rmdir()
    (world.grader / "tests.py").write_text("the tests\n")
    (world.grader / "tests.py").chmod(0o644)
    world.targets["grader_state"] = _state(world.grader)


@pytest.mark.parametrize(("name", "script"), CHANGES, ids=[name.replace(" ", "-") for name, _ in CHANGES])
def test_the_files_of_a_grader_can_be_changed_in_the_naive_sandbox(naive: World, name: str, script: str) -> None:
    if not ROOT and name in PRIVILEGED:
        pytest.skip("needs root")
    _reset(naive)
    hidden = attempt(naive, Attack(name, script))
    assert hidden or _tampered(naive)


@pytest.mark.parametrize(("name", "script"), CHANGES, ids=[name.replace(" ", "-") for name, _ in CHANGES])
def test_the_files_of_a_grader_stay_as_they_are(world: World, name: str, script: str) -> None:
    assert world.targets["grader"] == GRADER
    _reset(world)
    assert not attempt(world, Attack(name, script))
    assert not _tampered(world)
