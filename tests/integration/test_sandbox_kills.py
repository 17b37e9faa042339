"""Commands that will not end, and what is left of them: the kill suite of sandboxes for agents.

The promises, each of which the naive sandbox breaks: nothing of the command is left, the next command works, files are intact,
limits hold, and the verdict names the cause. Everything is looked at from outside. Each script is bounded by itself, so that the
machine stays well where no limit holds.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from shared.sandbox import SandboxUnavailable, channel
from shared.sandbox.contract import Cause, CommandResult, Sandbox, Session
from tests.integration.naive_sandbox import NaiveSandboxes
from tests.integration.sandbox_attacks import (
    LIMITS,
    TIME_S,
    World,
    adapters,
    cgroups_of,
    eventually,
    marked,
    mounts_at,
    of_user,
    once,
    python,
    user_of,
    works,
    world_of,
)
from tests.patience import eventually as wait_for
from tests.patience import patient, until, within

LONG = "sleep @mark@"
PYTHON_LONG = "import os, time\nos.execv('/bin/sleep', ['sleep', '@mark@'])"
DOUBLE_FORK = python(
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 256)\n        "
    + PYTHON_LONG.replace("\n", "\n        ")
    + "\n    os._exit(0)\nos.wait()"
)
DAEMONS = {
    "background child": f"{LONG} >/dev/null 2>&1 &",
    "setsid": f"setsid {LONG} >/dev/null 2>&1 &",
    "double fork": DOUBLE_FORK,
    "daemon without environment": f"env -i setsid -f /bin/{LONG} >/dev/null 2>&1 </dev/null",
    "deaf daemon": f"(trap '' TERM HUP INT; exec setsid -f {LONG} >/dev/null 2>&1 </dev/null)",
}
BOMB = "python3 -ISc 'import os, sys, time\n%s\ntime.sleep(600)' @mark@"
ENDLESS_BOMB = BOMB % "while True:\n    try: os.fork()\n    except OSError: pass"
SMALL_BOMB = (
    BOMB % f"for n in range({LIMITS.processes + 40}):\n    if os.fork() == 0: time.sleep(600)\nprint(n, flush=True)"
)
SPARE = 2  # processes of a cell that an adapter may have made ready for the next session
NOTE = 100  # bytes, which say how much was left out of an output
PYTHON_S = 1.0  # Python starts meanwhile
OVER_DISK, OVER_MEMORY = LIMITS.disk_mb + 40, LIMITS.memory_mb + 100
FILL = """
import time
try:
    for n in range(%d):
        %s
    while True:
        if os.wait()[1]:
            sys.exit('a child was killed')
except ChildProcessError:
    print('TOOK IT ALL')
except (OSError, MemoryError) as error:
    sys.exit(str(error))
"""


@dataclass(frozen=True, slots=True)
class Kill:
    """`broken`: the promise that the naive sandbox breaks; the others may hold there. `control`: its script; empty: the same."""

    name: str
    script: str
    causes: tuple[Cause, ...]
    broken: str
    time_s: float = 0.5
    control: str = ""
    throwaway: bool = False


def filler(name: str, megabytes: int, take: str, *causes: Cause) -> Kill:
    script = python(FILL % (megabytes, take))
    return Kill(name, script, causes, "limit", time_s=30.0)


KILLS = [
    Kill("sleep past the limit", LONG, (Cause.time_limit,), "works"),
    Kill("deaf to SIGTERM", f"trap '' TERM INT HUP QUIT; {LONG}", (Cause.time_limit,), "left"),
    *(
        Kill(
            name,
            f"{script}\n{LONG}",
            (Cause.time_limit,),
            "left" if name != "background child" else "works",
            PYTHON_S if "python" in script else 0.5,
        )
        for name, script in DAEMONS.items()
    ),
    Kill("fork bomb", ENDLESS_BOMB, (Cause.process_limit, Cause.time_limit), "limit", PYTHON_S, SMALL_BOMB),
    Kill(
        "kill everything",
        f"setsid {LONG} & sh -c 'kill -9 -1'; sleep 600",
        (Cause.session_ended, Cause.signalled),
        "works",
        5.0,
        "sh -c 'kill -9 -1'; sleep 600",
        True,
    ),
    Kill("kill its own shell", "kill -9 $$; sleep 600", (Cause.session_ended, Cause.signalled), "works", 5.0),
    Kill(
        "endless output",
        "yes | head -c 3G",
        (Cause.time_limit,),
        "limit",
        1.0,
        f"head -c {LIMITS.output_bytes * 8} /dev/zero",
    ),
    Kill(
        "endless errors",
        "yes | head -c 3G >&2",
        (Cause.time_limit,),
        "works",
        1.0,
        f"head -c {LIMITS.output_bytes * 8} /dev/zero >&2",
    ),
    Kill(
        "disk filler",
        f"head -c {OVER_DISK << 20} /dev/zero > filler && echo TOOK IT ALL",
        (Cause.disk_limit,),
        "limit",
        30.0,
    ),
    filler(
        "disk filler that hears no signal",
        OVER_DISK,
        "open('filler', 'ab').write(bytes(1 << 20))",
        Cause.disk_limit,
        Cause.exited,  # by its own will: it was told that the file is too large
    ),
    filler(
        "disk filler of many files",
        OVER_DISK,
        "open('filler-%d' % n, 'wb').write(bytes(1 << 20)); time.sleep(0.01)",  # the disk is looked at ten times a second
        Cause.disk_limit,
    ),
    filler(
        "memory filler", OVER_MEMORY, "globals().setdefault('kept', []).append(b'x' * (1 << 20))", Cause.memory_limit
    ),
    filler(
        "filler of memory without a name",
        OVER_MEMORY,
        "os.write(os.memfd_create('x'), b'x' * (1 << 20))",
        Cause.memory_limit,
    ),
    filler(
        "filler of memory in processes",
        OVER_MEMORY // 20,
        "if os.fork() == 0: (b'x' * (20 << 20), time.sleep(1.0), os._exit(0))",
        Cause.memory_limit,
    ),
    filler(
        "filler of /dev/shm",
        OVER_MEMORY,
        "open('/dev/shm/filler-@token@', 'ab').write(b'x' * (1 << 20))",
        Cause.memory_limit,
        Cause.disk_limit,
        Cause.exited,
    ),
]
CLEAN = "rm -rf filler* /dev/shm/filler-@token@"


@pytest.fixture(scope="module")
def naive() -> Iterator[World]:
    with world_of("naive") as world:
        yield world


@pytest.fixture(scope="module", params=adapters())
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as world:
        yield world


@pytest.fixture(autouse=True)
def answered_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb takes the machine's processor time from the sandbox that is to end it, and others have taken most of it before."""
    late_s = patient(channel.ANSWER_S)
    monkeypatch.setattr(channel, "ANSWER_S", late_s)
    monkeypatch.setitem(channel.Channel.ask.__kwdefaults__, "wait_s", late_s)


def broken_promises(world: World, kill: Kill, patience: float = 1.0) -> set[str]:
    """`patience`: times the time limit that the command has."""
    return world.runner.run(_broken_promises(world, kill, patience))


async def _broken_promises(world: World, kill: Kill, patience: float) -> set[str]:
    sandbox = await world.opened() if world.naive else world.mine
    await once(sandbox, "echo intact > file")
    session = await sandbox.session()
    user = await user_inside(world, sandbox)
    before = len(of_user(user))
    script = kill.control if world.naive and kill.control else kill.script
    result = await session.run(world.text(script), time_s=kill.time_s * patience)
    broken = set()
    if not gone(world):
        broken.add("left")
    if user and not eventually(lambda: len(of_user(user)) <= before + SPARE):
        broken.add("left")
    if result.cause not in kill.causes:
        broken.add(f"cause: {result.cause}")
    if _over(result):
        broken.add("limit")
    await _after(world, session, sandbox, broken, Cause.disk_limit in kill.causes)
    await session.close()
    return broken


async def _after(world: World, session: Session, sandbox: Sandbox, broken: set[str], full: bool) -> None:
    """`full`: the disk may still be found full during the next command, which then ends, too; the one after it works."""
    if not (await works(session) or (full and await works(session))):
        broken.add("works")
    await once(sandbox, world.text(CLEAN))
    archive = await sandbox.get(["file"])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        file = tar.extractfile("file")
        if file is None or file.read() != b"intact\n":
            broken.add("files")


def _over(result: CommandResult) -> bool:
    """Return whether the command took more than it may: it printed so, or printed too much."""
    if max(len(result.stdout), len(result.stderr)) > LIMITS.output_bytes + NOTE:
        return True
    last = result.stdout.strip().split(b"\n")[-1]
    return last == b"TOOK IT ALL" or (last.isdigit() and int(last) > LIMITS.processes)


async def user_inside(world: World, sandbox: Sandbox) -> int:
    """Return the sandbox's user on this machine, 0 for one that is not its own."""
    if world.naive:
        return 0
    program = await sandbox.spawn(["/bin/sleep", world.text("3@token@")])
    found = await wait_for(lambda: marked("3" + world.token), "the program to begin")
    user = user_of(min(found))
    await program.kill()
    return 0 if user == os.geteuid() else user


IDS = [kill.name.replace(" ", "-") for kill in KILLS]


@pytest.mark.parametrize("kill", KILLS, ids=IDS)
def test_the_naive_sandbox_breaks_a_promise(naive: World, kill: Kill) -> None:
    if kill.throwaway:
        with world_of("naive", lambda: NaiveSandboxes(throwaway=True)) as world:
            assert kill.broken in broken_promises(world, kill)
        return
    for patience in (1.0, 4.0, 16.0):  # on a busy machine an attack may not have begun when its time is over
        try:
            broken = broken_promises(naive, kill, patience)
        finally:
            naive.end_left()
        if kill.broken in broken:
            return
    pytest.fail(f"broken: {broken}; expected also {kill.broken}")


@pytest.mark.parametrize("kill", KILLS, ids=IDS)
def test_nothing_is_left_and_the_next_command_works(world: World, kill: Kill) -> None:
    try:
        assert broken_promises(world, kill) == set()
    except SandboxUnavailable as error:
        world.runner.run(world.renew())
        pytest.fail(f"the sandbox was lost by its own doing: {error}")


def test_a_chain_of_forks_ends_with_its_script(world: World) -> None:
    """Each link forks the next and ends, so that no link lives long enough to be looked at."""
    chain = (
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nend = time.monotonic() + 60\n"
        'while time.monotonic() < end:\n    open("beat", "w").close()\n    if os.fork(): os._exit(0)'
    )
    script = f"python3 -ISc '{chain}' @mark@ & wait; sleep 600"

    async def scenario() -> None:
        session = await world.mine.session()
        result = await session.run(world.text(script), time_s=PYTHON_S)
        assert result.cause == Cause.time_limit
        assert await works(session)
        beat = await session.run("rm -f beat; sleep 0.5; test -e beat", time_s=TIME_S)
        assert beat.exit_code == 1
        await session.close()

    world.runner.run(scenario())


@pytest.mark.parametrize("name", DAEMONS)
def test_a_daemon_outlives_its_session_in_the_naive_sandbox(naive: World, name: str) -> None:
    assert (_outlives_its_session(naive, name)) == (name != "background child")


@pytest.mark.parametrize("name", DAEMONS)
def test_a_daemon_lives_as_long_as_its_session(world: World, name: str) -> None:
    assert not _outlives_its_session(world, name)


def gone(world: World) -> bool:
    """Return whether all that a command began has ended. The naive sandbox ends nothing, so there it is looked at briefly."""
    if world.naive:
        return within(lambda: not marked(world.targets["mark"]), 0.3, "the naive sandbox ends what a command left")
    return eventually(lambda: not marked(world.targets["mark"]))


def _outlives_its_session(world: World, name: str) -> bool:
    session = world.runner.run(world.mine.session())
    world.runner.run(session.run(world.text(DAEMONS[name]), time_s=20.0))
    until(lambda: bool(marked(world.targets["mark"])))
    assert world.runner.run(works(session))
    world.runner.run(session.close())
    try:
        return not gone(world)
    finally:
        world.end_left()


def test_kill_everything_reaches_no_other_session_program_or_sandbox(world: World) -> None:
    async def scenario() -> None:
        mine, theirs = await world.mine.session(), await world.other.session()
        program = await world.mine.spawn(["/bin/cat"])
        await theirs.run("x=kept", time_s=20.0)
        await mine.run("kill -9 -1; kill -STOP -1", time_s=2.0)
        await program.send(b"one\n")
        assert await program.receive(100) == b"one\n"
        assert (await theirs.run("echo $x", time_s=20.0)).stdout == b"kept\n"
        await program.kill()
        assert await works(mine)
        await mine.close()
        await theirs.close()

    world.runner.run(scenario())


def test_closing_a_sandbox_leaves_nothing(world: World) -> None:
    async def scenario() -> None:
        sandbox = await world.opened()
        session = await sandbox.session()
        await session.run(
            world.text("; ".join(DAEMONS[name] for name in ("setsid", "deaf daemon")).replace("&;", "&")), time_s=20.0
        )
        await session.run(
            "touch only-here; mkdir -p a/b; touch a/b/c; ln -s / a/d; mkfifo a/e; chmod 000 a/b a", time_s=20.0
        )
        until(lambda: len(marked(world.targets["mark"])) >= 2)
        pid = min(marked(world.targets["mark"]))
        user, groups = user_of(pid), cgroups_of(pid)
        held = len(of_user(user)) - 1
        folders = [path.parents[1] for path in world.folder.rglob("only-here")]  # the pool makes others meanwhile
        assert bool(folders) == (world.name != "docker")
        await sandbox.close()
        until(lambda: not marked(world.targets["mark"]))
        # Where all sandboxes have one user, others go on.
        assert user == os.geteuid() or eventually(lambda: len(of_user(user)) < held)
        until(lambda: not [group for group in groups if group.exists()])
        assert not [folder for folder in folders if folder.exists()]
        with pytest.raises((SandboxUnavailable, ConnectionError)):
            await session.run("true", time_s=5.0)

    mounts = mounts_at(world.folder)
    world.runner.run(scenario())
    assert len(mounts_at(world.folder)) <= len(mounts)
