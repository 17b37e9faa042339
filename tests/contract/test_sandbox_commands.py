"""Sandboxes for commands: files, output, time limits, and that nothing of a command outlives it or leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from shared.sandbox import Limits, Sandbox, Sandboxes
from shared.sandbox.commands import BubblewrapSandbox
from tests.contract.sandboxes import COMMANDS, NO_BWRAP, every

only_bubblewrap = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)


class Within(Protocol):
    def __call__(
        self, scenario: Callable[[Sandbox], Awaitable[None]], files: dict[str, bytes] | None = None, **limits: int
    ) -> None: ...


def within(sandboxes: Sandboxes) -> Within:
    """A scenario in a sandbox of its own."""

    def call(
        scenario: Callable[[Sandbox], Awaitable[None]], files: dict[str, bytes] | None = None, **limits: int
    ) -> None:
        async def run() -> None:
            sandbox = await sandboxes.start(files or {}, Limits(**{"processes": 32, **limits}))  # type: ignore[arg-type]
            try:
                async with asyncio.timeout(120):
                    await scenario(sandbox)
            finally:
                await sandbox.close()

        asyncio.run(run())

    return call


@pytest.fixture(params=every(COMMANDS))
def in_sandbox(request: pytest.FixtureRequest) -> Within:
    return within(request.param.make())


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def test_a_command_gets_its_input_and_gives_output_and_exit_code(in_sandbox: Within) -> None:
    async def scenario(sandbox: Sandbox) -> None:
        result = await sandbox.exec(shell("cat; echo err >&2; exit 7"), time_s=60, stdin=b"hello")
        assert (result.exit_code, result.stdout, result.stderr, result.truncated) == (7, b"hello", b"err\n", False)
        missing = await sandbox.exec(["/no/such/program"], time_s=60)
        assert missing.exit_code not in (0, None)

    in_sandbox(scenario)


def test_files_persist_between_commands_and_processes_do_not(in_sandbox: Within) -> None:
    async def scenario(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(shell("cat a/b; echo 2 > c; (setsid sleep 600 &) ; true"), time_s=60)).stdout == b"1"
        assert await sandbox.read("c", 100) == b"2\n"
        seen = await sandbox.exec(shell("ls /proc | grep -c '^[0-9]'"), time_s=60)
        assert int(seen.stdout) <= 5
        assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]

    in_sandbox(scenario, {"a/b": b"1"})


def test_a_command_past_its_time_is_killed_with_all_it_started(in_sandbox: Within) -> None:
    async def scenario(sandbox: Sandbox) -> None:
        result = await sandbox.exec(shell("trap '' TERM; (setsid sleep 611 &); echo begun; sleep 612"), time_s=1.0)
        assert result.exit_code is None
        assert result.stdout == b"begun\n"
        assert not [p for p in psutil.process_iter(["cmdline"]) if {"611", "612"} & set(p.info["cmdline"] or [])]
        left = await sandbox.exec(shell("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -cx 61[12]"), time_s=60)
        assert left.stdout == b"0\n"  # where the host sees no process of a sandbox
        assert (await sandbox.exec(["/bin/true"], time_s=60)).exit_code == 0

    in_sandbox(scenario)


def test_a_command_is_ended_however_early_that_is(in_sandbox: Within) -> None:
    """Its sandbox takes some 20 ms to be made."""

    async def scenario(sandbox: Sandbox) -> None:
        mark = f"{600 + os.getpid() / 1e8:.8f}"  # seconds, and how to know it
        for at in range(60):
            if at % 2:
                assert (await sandbox.exec(["/bin/sleep", mark], time_s=at / 2500)).exit_code is None
            else:
                running = asyncio.create_task(sandbox.exec(["/bin/sleep", mark], time_s=60))
                await asyncio.sleep(at / 2500)
                running.cancel()
                await asyncio.wait([running])
        while any(mark in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    in_sandbox(scenario)


def test_output_is_cut_at_the_limit_and_the_writer_never_blocks(in_sandbox: Within) -> None:
    async def scenario(sandbox: Sandbox) -> None:
        result = await sandbox.exec(shell("head -c 5000000 /dev/zero; echo done >&2"), time_s=60)
        assert (len(result.stdout), result.stderr, result.truncated) == (1000, b"done\n", True)

    in_sandbox(scenario, output_bytes=1000)


def test_large_files_go_in_and_come_out(in_sandbox: Within) -> None:
    async def scenario(sandbox: Sandbox) -> None:
        data = os.urandom(3 << 20)
        await sandbox.write("deep/er/file", data)
        assert await sandbox.read("deep/er/file", 4 << 20) == data
        assert await sandbox.read("deep/er/file", 10) == data[:10]
        with pytest.raises(FileNotFoundError):
            await sandbox.read("none", 10)

    in_sandbox(scenario)


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_paths_outside_are_refused(in_sandbox: Within, path: str) -> None:
    async def scenario(sandbox: Sandbox) -> None:
        with pytest.raises(ValueError, match="expected a relative"):
            await sandbox.write(path, b"")

    in_sandbox(scenario)


def test_links_lead_nowhere(in_sandbox: Within, tmp_path: Path) -> None:
    async def scenario(sandbox: Sandbox) -> None:
        secret = tmp_path / "secret"
        secret.write_text("secret")
        await sandbox.exec(["/bin/ln", "-s", str(secret), "link"], time_s=60)
        await sandbox.exec(["/bin/ln", "-s", str(tmp_path), "folder"], time_s=60)
        with pytest.raises(FileNotFoundError):
            await sandbox.read("link", 100)
        with pytest.raises(OSError, match="cannot write"):
            await sandbox.write("folder/new", b"x")
        assert not (tmp_path / "new").exists()

    in_sandbox(scenario)


def test_a_command_has_no_network_and_no_setting_of_ours(in_sandbox: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to a server on the machine that asks for the sandbox, by whatever address that has."""
    monkeypatch.setenv("ETUDE_S3_SECRET_KEY", "secret")

    async def scenario(sandbox: Sandbox) -> None:
        environment = await sandbox.exec(["/usr/bin/env"], time_s=60)
        assert b"ETUDE" not in environment.stdout
        with socket.create_server(("0.0.0.0", 0)) as server:
            port = server.getsockname()[1]
            addresses = {"127.0.0.1"}
            with contextlib.suppress(OSError):
                addresses |= {
                    str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
                }
            for address in addresses:
                socket.create_connection((address, port), timeout=10).close()
                reached = await sandbox.exec(["/bin/bash", "-c", f"echo > /dev/tcp/{address}/{port}"], time_s=10)
                assert reached.exit_code != 0, address

    in_sandbox(scenario)


@only_bubblewrap
def test_the_host_is_out_of_reach() -> None:
    async def scenario(sandbox: Sandbox) -> None:
        for script in (
            "cat /etc/passwd",
            "ls /home /root",
            "touch /usr/x",
            "touch /x",
            "kill -9 -1; cat /etc/shadow",
            "echo > /dev/tcp/1.1.1.1/53",
            "ls /sys/class",
        ):
            assert (await sandbox.exec(["/bin/bash", "-c", script], time_s=60)).exit_code != 0, script
        networks = await sandbox.exec(shell("tail -n +3 /proc/net/dev | wc -l"), time_s=60)
        assert int(networks.stdout) <= 1

    within(COMMANDS["bubblewrap"].make())(scenario)


@only_bubblewrap
def test_commands_reach_local_servers_of_their_own_and_no_privilege() -> None:
    async def scenario(sandbox: Sandbox) -> None:
        local = (
            "use Socket; for my $f (AF_UNIX, AF_INET) { socket(my $s, $f, SOCK_STREAM, 0) or die } "
            "print socket(my $v, 40, SOCK_STREAM, 0) ? 'vsock' : 'refused'"
        )
        found = await sandbox.exec(["/usr/bin/perl", "-e", local], time_s=60)
        assert (found.exit_code, found.stdout) == (0, b"refused"), found.stderr
        for script in ("unshare --user true", "unshare --mount true", "mount -t tmpfs none /tmp"):
            assert (await sandbox.exec(shell(script), time_s=60)).exit_code != 0, script
        assert b"Seccomp:\t2" in (await sandbox.exec(["/bin/cat", "/proc/self/status"], time_s=60)).stdout

    within(COMMANDS["bubblewrap"].make())(scenario)


def test_a_fork_bomb_and_a_memory_bomb_stay_inside(in_sandbox: Within) -> None:
    async def scenario(sandbox: Sandbox) -> None:
        bomb = await sandbox.exec(["/bin/bash", "-c", "b() { b | b & }; b; sleep 600"], time_s=1.5)
        assert bomb.exit_code is None or bomb.exit_code != 0
        memory = await sandbox.exec(["/usr/bin/perl", "-e", "my @x; push @x, 'x' x (1 << 24) while 1"], time_s=60)
        assert memory.exit_code != 0
        assert (await sandbox.exec(["/bin/true"], time_s=60)).exit_code == 0

    in_sandbox(scenario, memory_mb=256)


@only_bubblewrap
def test_what_a_command_may_keep_open_is_limited_and_cannot_be_more_again() -> None:
    async def scenario(sandbox: Sandbox) -> None:
        found = await sandbox.exec(["/bin/bash", "-c", "ulimit -Hn; ulimit -n 4096"], time_s=60)
        assert found.exit_code != 0
        assert 0 < int(found.stdout) <= 1024

    within(COMMANDS["bubblewrap"].make())(scenario)


@only_bubblewrap
def test_what_a_command_writes_into_memory_is_limited() -> None:
    async def scenario(sandbox: Sandbox) -> None:
        folders = 'awk \'$2 != "/workspace" && $4 ~ /^rw/ && $3 == "tmpfs" { print $2 }\' /proc/mounts'
        found = await sandbox.exec(shell(folders), time_s=60)
        assert found.stdout.split() == [b"/tmp", b"/dev/shm"]
        for folder in ("/tmp", "/dev/shm"):
            size = await sandbox.exec(
                shell(f"echo x > {folder}/x && df --output=size -B1 {folder} | tail -n 1"), time_s=60
            )
            assert 0 < int(size.stdout) <= 1 << 28, folder
        assert (await sandbox.exec(shell("echo x > /dev/x"), time_s=60)).exit_code != 0
        assert (await sandbox.exec(shell("echo x > /dev/null && head -c 1 /dev/urandom"), time_s=60)).exit_code == 0

    within(COMMANDS["bubblewrap"].make())(scenario)


@only_bubblewrap
@pytest.mark.parametrize(
    "script",
    [
        "mkdir -p a/b; touch a/b/c; ln -s / a/b/d; mkfifo a/e; chmod 000 a/b a",
        # 15,000 characters: more than a path may have
        "perl -e 'for (1 .. 3000) { mkdir q(aaaa) and chdir q(aaaa) or die; mkdir q(b); chmod 0, q(b) }'",
    ],
    ids=["unreadable", "deep"],
)
def test_closing_removes_the_files_even_if_they_resist(script: str) -> None:
    folders: list[Path] = []

    async def scenario(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, BubblewrapSandbox)
        folders.append(sandbox._folder)
        assert (await sandbox.exec(shell(script), time_s=60)).exit_code == 0

    within(COMMANDS["bubblewrap"].make())(scenario)
    assert folders
    assert not folders[0].exists()
