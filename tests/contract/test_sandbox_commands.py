"""Sandboxes for commands: files, output, time limits, and that nothing of a command outlives it or leaves."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from shared.sandbox import Limits, connect_commands
from shared.sandbox.commands import BubblewrapSandbox

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")


def in_sandbox(
    scenario: Callable[[BubblewrapSandbox], Awaitable[None]], files: dict[str, bytes] | None = None, **limits: int
) -> None:
    async def run() -> None:
        sandbox = await connect_commands("bubblewrap").start(files or {}, Limits(**{"processes": 32, **limits}))  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(scenario(sandbox), 120)  # type: ignore[arg-type]
        finally:
            await sandbox.close()

    asyncio.run(run())


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def test_a_command_gets_its_input_and_gives_output_and_exit_code() -> None:
    async def scenario(sandbox: BubblewrapSandbox) -> None:
        result = await sandbox.exec(shell("cat; echo err >&2; exit 7"), time_s=60, stdin=b"hello")
        assert (result.exit_code, result.stdout, result.stderr, result.truncated) == (7, b"hello", b"err\n", False)
        missing = await sandbox.exec(["/no/such/program"], time_s=60)
        assert missing.exit_code not in (0, None)

    in_sandbox(scenario)


def test_files_persist_between_commands_and_processes_do_not() -> None:
    async def scenario(sandbox: BubblewrapSandbox) -> None:
        assert (await sandbox.exec(shell("cat a/b; echo 2 > c; (setsid sleep 600 &) ; true"), time_s=60)).stdout == b"1"
        assert await sandbox.read("c", 100) == b"2\n"
        seen = await sandbox.exec(shell("ls /proc | grep -c '^[0-9]'"), time_s=60)
        assert int(seen.stdout) <= 5
        assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]

    in_sandbox(scenario, {"a/b": b"1"})


def test_a_command_past_its_time_is_killed_with_all_it_started() -> None:
    async def scenario(sandbox: BubblewrapSandbox) -> None:
        result = await sandbox.exec(shell("trap '' TERM; (setsid sleep 611 &); echo begun; sleep 612"), time_s=1.0)
        assert result.exit_code is None
        assert result.stdout == b"begun\n"
        assert not [p for p in psutil.process_iter(["cmdline"]) if {"611", "612"} & set(p.info["cmdline"] or [])]
        assert (await sandbox.exec(["/bin/true"], time_s=60)).exit_code == 0

    in_sandbox(scenario)


def test_output_is_cut_at_the_limit_and_the_writer_never_blocks() -> None:
    async def scenario(sandbox: BubblewrapSandbox) -> None:
        result = await sandbox.exec(shell("head -c 5000000 /dev/zero; echo done >&2"), time_s=60)
        assert (len(result.stdout), result.stderr, result.truncated) == (1000, b"done\n", True)

    in_sandbox(scenario, output_bytes=1000)


def test_large_files_go_in_and_come_out() -> None:
    async def scenario(sandbox: BubblewrapSandbox) -> None:
        data = os.urandom(3 << 20)
        await sandbox.write("deep/er/file", data)
        assert await sandbox.read("deep/er/file", 4 << 20) == data
        assert await sandbox.read("deep/er/file", 10) == data[:10]
        with pytest.raises(FileNotFoundError):
            await sandbox.read("none", 10)

    in_sandbox(scenario)


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_paths_outside_are_refused(path: str) -> None:
    async def scenario(sandbox: BubblewrapSandbox) -> None:
        with pytest.raises(ValueError, match="expected a relative"):
            await sandbox.write(path, b"")

    in_sandbox(scenario)


def test_links_lead_nowhere(tmp_path: Path) -> None:
    async def scenario(sandbox: BubblewrapSandbox) -> None:
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


def test_the_host_is_out_of_reach() -> None:
    async def scenario(sandbox: BubblewrapSandbox) -> None:
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
        environment = await sandbox.exec(["/usr/bin/env"], time_s=60)
        assert b"ETUDE" not in environment.stdout
        networks = await sandbox.exec(shell("tail -n +3 /proc/net/dev | wc -l"), time_s=60)
        assert int(networks.stdout) <= 1

    in_sandbox(scenario)


def test_a_fork_bomb_and_a_memory_bomb_stay_inside() -> None:
    async def scenario(sandbox: BubblewrapSandbox) -> None:
        bomb = await sandbox.exec(["/bin/bash", "-c", "b() { b | b & }; b; sleep 600"], time_s=1.5)
        assert bomb.exit_code is None or bomb.exit_code != 0
        memory = await sandbox.exec(["/usr/bin/perl", "-e", "my @x; push @x, 'x' x (1 << 24) while 1"], time_s=60)
        assert memory.exit_code != 0
        assert (await sandbox.exec(["/bin/true"], time_s=60)).exit_code == 0

    in_sandbox(scenario, memory_mb=256)


def test_closing_removes_the_files_even_if_they_resist() -> None:
    folders: list[Path] = []

    async def scenario(sandbox: BubblewrapSandbox) -> None:
        folders.append(sandbox._folder)
        await sandbox.exec(shell("mkdir -p a/b; touch a/b/c; chmod 000 a/b a"), time_s=60)

    in_sandbox(scenario)
    assert folders
    assert not folders[0].exists()
