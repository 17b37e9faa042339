"""What shared.sandbox.contract promises, by every adapter."""

from __future__ import annotations

import asyncio
import io
import shutil
import tarfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from shared.sandbox import SandboxUnavailable, archives
from shared.sandbox.contract import (
    Base,
    Capability,
    Caps,
    Cause,
    CommandResult,
    Limits,
    Network,
    Sandbox,
    Sandboxes,
    Session,
    Snapshot,
)
from tests import docker_engine
from tests.contract.sandboxes import AGENTS, every
from tests.patience import quiet

LIMITS = Limits(memory_mb=512, disk_mb=512, processes=64, seconds=600.0)
TIME_S = 60.0  # a busy machine must not end a command that does nothing wrong

Scenario = Callable[[Sandbox, Session], Awaitable[None]]


class Within(Protocol):
    def __call__(self, scenario: Scenario, base: Base = Base(), limits: Limits = LIMITS) -> None: ...


@pytest.fixture(params=every(AGENTS))
def sandboxes(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Sandboxes]:
    return lambda: request.param.make(tmp_path / "state")


@pytest.fixture
def within(sandboxes: Callable[[], Sandboxes]) -> Within:
    """A scenario in a sandbox of its own, with a session."""

    def call(scenario: Scenario, base: Base = Base(), limits: Limits = LIMITS) -> None:
        async def run() -> None:
            adapter = sandboxes()
            try:
                async with asyncio.timeout(200):
                    sandbox = await adapter.open(base, limits)
                    await scenario(sandbox, await sandbox.session())
            finally:
                await adapter.close()

        asyncio.run(run())

    return call


async def said(session: Session, script: str) -> str:
    """Run a script that must succeed. Return its output."""
    done = await session.run(script, time_s=TIME_S)
    assert (done.exit_code, done.cause) == (0, Cause.exited), done
    return done.stdout.decode().strip()


def ending(done: CommandResult) -> tuple[int | None, Cause, bool]:
    return done.exit_code, done.cause, done.fresh


# Sessions


def test_the_user_has_a_name_and_a_home(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        assert await said(session, "echo $USER $LOGNAME $HOME") == "agent agent /home/agent"
        asked = "import getpass, os; print(getpass.getuser(), os.path.expanduser('~'))"
        assert await said(session, f'python3 -c "{asked}"') == "agent /home/agent"

    within(scenario)


def test_a_session_keeps_folder_variables_functions_and_background_processes(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        await said(session, "mkdir a && cd a && x=5; export Y=6; f() { echo $x; }; sleep 600 & bg=$!")
        assert await said(session, "pwd; f; sh -c 'echo $Y'; kill -0 $bg && echo alive") == "/workspace/a\n5\n6\nalive"
        other = await sandbox.session()
        assert await said(other, "pwd; echo [$x$Y]") == "/workspace\n[]"

    within(scenario)


def test_environment_and_folder_of_a_script_hold_for_it_alone(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        await said(session, "mkdir a; export X=session")
        done = await session.run("pwd; sh -c 'echo \"$X\"'; kept=1", time_s=TIME_S, env={"X": "it's\n$one"}, cwd="a")
        assert done.stdout == b"/workspace/a\nit's\n$one\n"
        assert await said(session, "pwd; echo $X; echo $kept") == "/workspace\nsession\n1"
        missing = await session.run("echo not run", time_s=TIME_S, cwd="/no/such/folder")
        assert missing.exit_code != 0
        assert missing.stdout == b""
        with pytest.raises(ValueError, match="env"):
            await session.run("true", time_s=TIME_S, env={"a b": ""})
        assert await said(session, "echo well") == "well"

    within(scenario, Base(environment={"FROM_BASE": "1"}))


def test_a_script_has_input_two_outputs_and_an_exit_code(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        data = bytes(range(256)) * 1000
        done = await session.run("cat; echo err >&2; (exit 7)", time_s=TIME_S, stdin=data)
        assert (done.stdout, done.stderr) == (data, b"err\n")
        assert ending(done) == (7, Cause.exited, False)
        empty = await session.run("cat", time_s=TIME_S)
        assert (empty.stdout, empty.lost_bytes) == (b"", 0)
        died = await session.run("sh -c 'kill -SEGV $$'", time_s=TIME_S)
        assert ending(died) == (139, Cause.signalled, False)
        assert (await session.run("echo 'unclosed", time_s=TIME_S)).exit_code != 0
        assert await said(session, "echo well") == "well"

    within(scenario)


def test_scripts_of_any_text_run(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        text = "é'\"\\ $(x) `y`\n\t!1 *" * 2000
        done = await session.run(f"cat <<'END'\n{text}\nEND", time_s=TIME_S)
        assert done.stdout.decode() == f"{text}\n"
        with pytest.raises(ValueError, match="NUL"):
            await session.run("echo \0", time_s=TIME_S)

    within(scenario)


def test_a_long_output_loses_its_middle(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        done = await session.run("echo first; head -c 5000000 /dev/zero; echo last", time_s=TIME_S)
        assert done.stdout.startswith(b"first\n")
        assert done.stdout.endswith(b"last\n")
        assert len(done.stdout) < 10_100
        assert done.lost_bytes == 5_000_000 + 11 - 10_000
        endless = await session.run("yes", time_s=1.0)
        assert ending(endless)[:2] == (None, Cause.time_limit)
        assert await said(session, "echo well") == "well"

    within(scenario, limits=replace(LIMITS, output_bytes=10_000))


def test_a_script_past_its_time_dies_with_all_that_it_started_and_nothing_else(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        await said(session, "x=5; sleep 901 &")
        late = await session.run("setsid sleep 902 & (setsid sleep 902 &); sleep 902; echo no >> file", time_s=1.0)
        assert ending(late) == (None, Cause.time_limit, False)
        assert await said(session, "echo $x; pgrep -f 'sleep 90[1]'; pgrep -f 'sleep 90[2]' || ls") != ""
        assert (await session.run("pgrep -f 'sleep 90[2]'", time_s=TIME_S)).exit_code == 1
        assert (await session.run("cat file", time_s=TIME_S)).exit_code == 1

    within(scenario)


def test_a_script_that_ignores_signals_ends_its_session(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        await said(session, "x=5; echo kept > file")
        for script in ("trap '' INT TERM; sleep 903", "(sleep 903; true)", "trap '' INT; while :; do :; done"):
            late = await session.run(script, time_s=1.0)
            assert ending(late) == (None, Cause.time_limit, True), script
            assert await said(session, "echo [$x]; cat file; pgrep -f 'sleep 90[3]' || true") == "[]\nkept"

    within(scenario)


def test_a_script_that_ends_its_shell_says_so_and_the_next_has_a_new_one(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        done = await session.run("echo bye; sleep 904 & exit 3", time_s=TIME_S)
        assert ending(done) == (3, Cause.session_ended, True)
        assert (done.stdout, done.stderr) == (b"bye\n", b"")
        assert await said(session, "pgrep -f 'sleep 90[4]' || echo none") == "none"
        assert ending(await session.run("kill -9 $$", time_s=TIME_S))[1:] == (Cause.session_ended, True)
        await session.run("setsid sleep 905 & kill -9 -1; exec sleep 0", time_s=TIME_S)
        assert await said(session, "pgrep -f 'sleep 90[5]' || echo none") == "none"

    within(scenario)


def test_a_cancelled_script_is_left_running_nowhere(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        running = asyncio.create_task(session.run("echo > began; sleep 906", time_s=TIME_S))
        other = await sandbox.session()
        await said(other, "until [ -e began ]; do sleep 0.05; done")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await said(session, "pgrep -f 'sleep 90[6]' || echo none") == "none"

    within(scenario)


def test_sessions_run_at_the_same_time_and_end_alone(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        other = await sandbox.session()
        waiting = asyncio.create_task(said(session, "until [ -e go ]; do sleep 0.05; done; echo went"))
        await said(other, "touch go")
        assert await waiting == "went"
        await other.close()
        await other.close()
        with pytest.raises(SandboxUnavailable):
            await other.run("true", time_s=TIME_S)
        assert await said(session, "echo well") == "well"

    within(scenario)


# Limits


def test_a_memory_limit_is_that_of_the_whole_sandbox_and_is_named(within: Within) -> None:
    hold = "python3 -c 'import time; x = bytearray(200 << 20); time.sleep(60)'"

    async def scenario(sandbox: Sandbox, session: Session) -> None:
        alone = await session.run("python3 -c 'x = bytearray(600 << 20)'", time_s=TIME_S)
        assert alone.cause == Cause.memory_limit
        assert alone.exit_code != 0
        together = await session.run(
            f"{hold} & {hold} & {hold} & wait -n; exit_code=$?; kill %1 %2 %3; (exit $exit_code)", time_s=TIME_S
        )
        assert together.cause == Cause.memory_limit
        await session.run("head -c 700m /dev/zero > /dev/shm/x", time_s=TIME_S)
        beside = await session.run("python3 -c 'x = bytearray(400 << 20)'", time_s=TIME_S)
        assert beside.cause == Cause.memory_limit
        assert await said(session, "rm -f /dev/shm/x; echo well") == "well"

    within(scenario)


def test_a_disk_limit_is_named_and_leaves_room_to_tidy_up(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        one = await session.run("head -c 200m /dev/zero > big", time_s=TIME_S)
        assert one.cause == Cause.disk_limit
        many = "for i in 1 2 3 4 5 6 7 8 9; do head -c 20m /dev/zero > f$i || exit 9; sleep 0.3; done"
        done = await session.run(f"rm -f big; sleep 1; {many}", time_s=TIME_S)
        assert done.cause == Cause.disk_limit
        assert await said(session, "rm -f f*; sleep 1; echo well") == "well"
        hidden = "; ".join(f"exec {fd}> h; rm h; head -c 60m /dev/zero >&{fd}" for fd in (4, 5, 6))
        nameless = await session.run(f"{hidden}; sleep 30", time_s=TIME_S)
        assert nameless.cause == Cause.disk_limit
        assert await said(session, "echo well") == "well"

    within(scenario, limits=replace(LIMITS, disk_mb=100))


HOLD = """import os, time
while True:
    try: os.fork()
    except OSError: time.sleep(300)"""
FULL = "until set -- /proc/[0-9]*; [ $# -ge 56 ]; do :; done"  # needs no fork


def test_a_fork_bomb_ends_at_the_process_limit_and_the_next_command_works(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        front = "import os\nwhile True: os.fork()"
        assert (await session.run(f"python3 -c '{front}'", time_s=3.0)).cause in (Cause.process_limit, Cause.time_limit)
        assert await said(session, "echo well") == "well"
        done = await session.run(f"python3 -c '{HOLD}' & {FULL}", time_s=TIME_S)
        assert (done.cause, done.fresh) == (Cause.process_limit, True)
        assert int(await said(session, "ls /proc | grep -c '^[0-9]'")) < 8

    within(scenario)


def test_a_fork_bomb_of_the_shell_ends_with_its_session(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        await session.run("bomb() { bomb | bomb & }; bomb; sleep 1", time_s=TIME_S)
        await session.close()  # while the bomb may be waiting for room to fork
        assert int(await said(await sandbox.session(), "ls /proc | grep -c '^[0-9]'")) < 8

    within(scenario)


def test_a_command_is_not_blamed_for_background_processes_of_an_earlier_one(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        many = "for i in $(seq 57); do sleep 60 & done; : > full; wait"
        forks = "until [ -e begun ]; do :; done; sleep 60 & : > forked"  # while no script runs: it is no idle server
        await said(session, f"({forks}; until [ -e go ]; do sleep 0.02; done; {many}) &")
        other = await sandbox.session()
        await said(other, ": > begun; until [ -e forked ]; do :; done")
        await other.close()
        assert await said(session, ": > go; until [ -e full ]; do :; done; echo innocent") == "innocent"
        assert await said(session, "echo well") == "well"

    within(scenario)


def test_a_sandbox_past_its_time_ends_its_script_by_the_limit(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        done = await session.run("sleep 60", time_s=TIME_S)
        assert done.cause == Cause.time_limit
        after = await session.run("echo no", time_s=TIME_S)
        assert (after.cause, after.stdout) == (Cause.time_limit, b"")

    within(scenario, limits=replace(LIMITS, seconds=3.0))


RUST = """fn main() { let mut all = Vec::new(); for i in 0..%d { all.push(vec![i as u8 | 1; 1 << 20]); }
println!("{}", all.len()); }"""
NODE = "const all = []; for (let i = 0; i < %d; i++) all.push(Buffer.alloc(1 << 20, i + 1)); console.log(all.length);"
JAVA = """public class Main { public static void main(String[] a) { var all = new java.util.ArrayList<byte[]>();
for (int i = 0; i < %d; i++) { byte[] x = new byte[1 << 20]; java.util.Arrays.fill(x, (byte) 1); all.add(x); }
System.out.println(all.size()); } }"""
LANGUAGES = {
    "node": ("main.js", NODE, "node main.js"),
    "java": ("Main.java", JAVA, "java -Xmx2g -XX:+UseSerialGC Main.java"),
    "rustc": ("main.rs", RUST, "rustc -O main.rs && ./main"),
}


# Drops a program's file from the page cache: whoever reads it next, here the sandbox, has it in its own memory. There the
# kernel drops and reads its pages anew before it finds that memory has run out.
FORGET = """python3 -c 'import os, shutil, sys
file = os.open(shutil.which(sys.argv[1]), os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)' """


def _with_compilers(adapter: str) -> Base:
    """Return a base where an adapter's sandboxes have the programs below: compilers may lie in a home."""
    if "docker" in adapter:
        docker_engine.need()
        return Base(f"docker:{docker_engine.compilers()}")
    chain = docker_engine.toolchain()
    return Base(mounts=((chain, "/opt/rust"),)) if chain else Base()


@pytest.mark.slow
@pytest.mark.parametrize("program", LANGUAGES)
def test_programs_that_reserve_address_space_run_under_a_memory_limit_and_die_at_it(
    within: Within, program: str, request: pytest.FixtureRequest
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    adapter = request.node.callspec.id
    if "kubernetes" in adapter:
        pytest.skip("the pods of tests/cluster.py have no cgroup of their own")
    base = _with_compilers(adapter)
    name, source, command = LANGUAGES[program]

    async def scenario(sandbox: Sandbox, session: Session) -> None:
        await said(session, "export PATH=$PATH:/opt/rust/bin:/opt/java/bin")
        await said(session, FORGET + program)
        for count, cause in ((50, Cause.exited), (1500, Cause.memory_limit)):
            await sandbox.put(archives.pack({name: (source % count).encode()}))
            done = await session.run(command, time_s=150.0)
            assert done.cause == cause, done
        assert await said(session, "echo well") == "well"

    within(scenario, base, replace(LIMITS, processes=256))


# Files


def test_files_cross_the_border_both_ways(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        big = bytes(range(256)) * 20_000
        await sandbox.put(archives.pack({"a/b": b"1", "big": big}))
        await sandbox.put(archives.pack({"c": b"#!/bin/sh\necho run"}, mode=0o755), "/tmp/deep/er")
        assert await said(session, "cat a/b; wc -c < big; /tmp/deep/er/c") == f"1{len(big)}\nrun"
        await said(session, "echo 2 > a/b; echo 3 > a/d; ln -s /etc/passwd a/link; mkfifo a/pipe")
        found = archives.unpack(await sandbox.get(["a", "/workspace/big"]))
        assert found == {"a/b": b"2\n", "a/d": b"3\n", "workspace/big": big}
        await sandbox.put(archives.pack({"a/link": b"a file now"}))
        assert await said(session, "cat a/link; test -L a/link || echo; grep -c root /etc/passwd") == "a file now\n1"

    within(scenario)


def _archive(kind: bytes, name: str, link: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        good = tarfile.TarInfo("good")
        archive.addfile(good, io.BytesIO())
        bad = tarfile.TarInfo(name)
        bad.type, bad.linkname = kind, link
        archive.addfile(bad)
    return out.getvalue()


def test_nothing_but_files_and_folders_below_crosses_the_border(within: Within) -> None:
    bad = [
        _archive(tarfile.SYMTYPE, "x", "/etc/passwd"),
        _archive(tarfile.LNKTYPE, "x", "good"),
        _archive(tarfile.CHRTYPE, "x"),
        _archive(tarfile.FIFOTYPE, "x"),
        _archive(tarfile.REGTYPE, "/tmp/x"),
        _archive(tarfile.REGTYPE, "../x"),
        _archive(tarfile.REGTYPE, "a/../../x"),
        b"no archive at all" * 100,
    ]

    async def scenario(sandbox: Sandbox, session: Session) -> None:
        for archive in bad:
            with pytest.raises(ValueError, match="archive"):
                await sandbox.put(archive)
        assert await said(session, "ls -A . /tmp | grep -E 'x|good' || true") == ""
        await said(session, "mkdir real; ln -s real linked; ln -s /etc/passwd link; mkfifo pipe; echo 1 > real/file")
        for path in ("link", "pipe", "linked/file", "../etc/passwd", "/dev/null"):
            with pytest.raises(ValueError, match="get"):
                await sandbox.get([path])
        with pytest.raises(ValueError, match="put"):
            await sandbox.put(archives.pack({"linked/new": b""}))
        assert await said(session, "ls real") == "file"
        with pytest.raises(FileNotFoundError):
            await sandbox.get(["missing"])

    within(scenario)


def test_transfers_have_caps(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        await said(
            session, "mkdir many; for i in 1 2 3 4 5; do echo 1234567 > many/$i; done; truncate -s 1T sparse || true"
        )
        assert len(archives.unpack(await sandbox.get(["many"], Caps(size=40, files=6)))) == 5
        for caps in (Caps(size=39, files=6), Caps(size=40, files=5)):
            with pytest.raises(ValueError, match="more than"):
                await sandbox.get(["many"], caps)
        await said(session, "truncate -s 300M sparse")
        with pytest.raises(ValueError, match="more than"):
            await sandbox.get(["sparse"])

    within(scenario)


def test_changes_are_what_differs_from_the_tree(within: Within, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    for name in ("same", "edited", "gone", "sub/moved"):
        (tree / name).write_text(name)
    (tree / "link").symlink_to("same")

    async def scenario(sandbox: Sandbox, session: Session) -> None:
        none = await sandbox.changes()
        assert (archives.unpack(none.written), none.deleted, dict(none.refused)) == ({}, (), {})
        await said(
            session, "echo new > edited; touch same; rm gone; mv sub/moved sub/there; mkdir empty; echo 1 > fresh"
        )
        await said(session, "ln -sf /etc/passwd link; mkfifo pipe; ln -s nowhere dangling")
        found = await sandbox.changes()
        assert archives.unpack(found.written) == {"edited": b"new\n", "sub/there": b"sub/moved", "fresh": b"1\n"}
        assert found.deleted == ("gone", "sub/moved")
        assert set(found.refused) == {"link", "pipe", "dangling"}
        with pytest.raises(ValueError, match="more than"):
            await sandbox.changes(Caps(size=1 << 20, files=2))

    within(scenario, Base(tree=tree))
    assert (tree / "edited").read_text() == "edited"


def test_mounts_can_be_read_and_not_written(within: Within, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "file").write_text("content")
    folder.chmod(0o755)

    async def scenario(sandbox: Sandbox, session: Session) -> None:
        assert await said(session, "cat /opt/data/file; echo; echo $NAME") == "content\nvalue"
        assert (await session.run("touch /opt/data/x || rm -f /opt/data/file", time_s=TIME_S)).exit_code != 0

    within(scenario, Base(mounts=((folder, "/opt/data"),), environment={"NAME": "value"}))
    assert [path.name for path in folder.iterdir()] == ["file"]


# Snapshots


def test_a_snapshot_sets_files_back_and_opens_elsewhere(sandboxes: Callable[[], Sandboxes]) -> None:
    async def run() -> None:
        adapter = sandboxes()
        if Capability.snapshot not in adapter.capabilities:
            pytest.skip("no snapshots")
        try:
            first = await adapter.open(Base(), LIMITS)
            session = await first.session()
            await said(
                session, "mkdir -m 700 d; echo 1 > d/f; chmod 755 d/f; ln -s d/f l; mkfifo p; echo t > /tmp/t; x=1"
            )
            kept = await first.snapshot()
            assert kept.size > 0
            assert await said(session, "echo $x") == "1"
            await said(session, "rm -rf d l p /tmp/t; echo 2 | tee other > /dev/shm/s; sleep 907 &")
            await first.restore(kept)
            assert await said(session, "ls /dev/shm") == ""
            look = "cat l /tmp/t; stat -c %a d d/f; test -p p; ls; echo [$x]; pgrep -f 'sleep 90[7]' || true"
            assert await said(session, look) == "1\nt\n700\n755\nd\nl\np\n[]"
            await said(session, "echo 3 > d/f")
            if Capability.fork in adapter.capabilities:
                second = await adapter.open(Base(), LIMITS, snapshot=kept)
                other = await second.session()
                assert await said(other, "cat l; echo 4 > d/f; cat l") == "1\n4"
                assert await said(session, "cat l") == "3"
                await second.close()
            await first.close()
            with pytest.raises(ValueError, match="snapshot"):
                await adapter.open(Base(), LIMITS, snapshot=kept)
            with pytest.raises(ValueError, match="snapshot"):
                await adapter.open(Base(), LIMITS, snapshot=Snapshot("/etc", 0))
        finally:
            await adapter.close()

    asyncio.run(run())


# Programs


def test_a_program_speaks_through_pipes_and_no_session_reaches_it(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        program = await sandbox.spawn(["/bin/sh", "-c", 'pwd; while read -r x; do echo "<$x>"; done; sleep 908'])
        got = b""
        await program.send(b"one\ntwo\n")
        while got.count(b"\n") < 3:
            got += await program.receive(5)
        assert got == b"/workspace\n<one>\n<two>\n"
        assert await said(session, "pgrep -f 'sleep 90[8]|while read' | grep -v $$ || echo none") == "none"
        await session.run("kill -9 -1", time_s=TIME_S)
        assert program.alive
        await program.kill()
        await program.kill()
        assert not program.alive
        with pytest.raises(ConnectionError):
            await program.send(b"three\n")

    within(scenario)


def test_a_program_that_ends_wrote_its_last_and_loses_nothing(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        program = await sandbox.spawn(["/bin/sh", "-c", "head -c 3000000 /dev/zero; echo end; echo error >&2"])
        await quiet(0.3, "the program writes and ends while nobody reads")
        got = b""
        while part := await program.receive(100_000):
            assert len(part) <= 100_000
            got += part
        assert got == bytes(3_000_000) + b"end\nerror\n"
        assert not program.alive
        assert await said(session, "echo well") == "well"
        echo = await sandbox.spawn(["/bin/cat"])
        data = bytes(range(256)) * 8000
        sending = asyncio.create_task(echo.send(data))
        back = b""
        while len(back) < len(data):
            back += await echo.receive(1 << 20)
        await sending
        assert back == data
        with pytest.raises((SandboxUnavailable, OSError), match="no/such"):
            await sandbox.spawn(["/no/such/program"])

    within(scenario)


# Life


def test_requests_that_cannot_be_met_are_refused(sandboxes: Callable[[], Sandboxes]) -> None:
    async def run() -> None:
        adapter = sandboxes()
        try:
            for image in ("base:none", "no scheme"):
                with pytest.raises((ValueError, SandboxUnavailable)):
                    await adapter.open(Base(image=image), LIMITS)
            with pytest.raises(ValueError, match="limits"):
                await adapter.open(Base(), replace(LIMITS, memory_mb=0))
            if Capability.network not in adapter.capabilities:
                with pytest.raises(ValueError, match="network"):
                    await adapter.open(Base(), LIMITS, Network(allow=("example.org",)))
        finally:
            await adapter.close()

    asyncio.run(run())


def test_a_closed_sandbox_refuses_and_closes_again(within: Within) -> None:
    async def scenario(sandbox: Sandbox, session: Session) -> None:
        waiting = asyncio.create_task(session.run("sleep 60", time_s=TIME_S))
        await asyncio.sleep(0.1)
        await sandbox.close()
        await sandbox.close()
        await session.close()
        with pytest.raises(SandboxUnavailable):
            await waiting
        for call in (sandbox.session, sandbox.snapshot, sandbox.changes):
            with pytest.raises(SandboxUnavailable):
                await call()
        with pytest.raises(SandboxUnavailable):
            await sandbox.get(["x"])

    within(scenario)


def test_sandboxes_do_not_see_each_other(sandboxes: Callable[[], Sandboxes]) -> None:
    async def run() -> None:
        adapter = sandboxes()
        try:
            first, second = await asyncio.gather(adapter.open(Base(), LIMITS), adapter.open(Base(), LIMITS))
            one, two = await first.session(), await second.session()
            await said(one, "echo secret > /tmp/f; echo secret > f; echo secret > /dev/shm/f; sleep 909 &")
            await said(two, "! cat /tmp/f f /dev/shm/f 2>&1 | grep secret; ! pgrep -f 'sleep 90[9]'")
        finally:
            await adapter.close()

    asyncio.run(run())
