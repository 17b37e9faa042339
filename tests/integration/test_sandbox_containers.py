"""Sandboxes in containers: what only this adapter promises. tests/contract/test_sandboxes.py has what all of them do."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.sandbox import SandboxUnavailable, archives
from shared.sandbox.containers import bundle, engine, labels, reaper
from shared.sandbox.containers.sandboxes import ContainerSandboxes
from shared.sandbox.contract import Base, Cause, Limits
from shared.sandbox.inside.layer import VOLUME
from tests import docker_engine
from tests.patience import eventually, until

LIMITS = Limits(memory_mb=128, disk_mb=64, processes=32, seconds=300.0)
TIME_S = 60.0
WORKER = """
import asyncio, sys
from shared.sandbox.containers.sandboxes import ContainerSandboxes
from shared.sandbox.contract import Base, Limits

async def main():
    adapter = ContainerSandboxes(image=sys.argv[1], run=sys.argv[2])
    sandbox = await adapter.open(Base(), Limits(seconds=300.0))
    session = await sandbox.session()
    await sandbox.snapshot()
    await session.run("setsid sleep 600 &", time_s=60.0)
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def run() -> str:
    docker_engine.need()
    return f"test-{secrets.token_hex(6)}"


def containers_of(run: str) -> list[dict[str, Any]]:
    found = engine.connect()
    try:
        return list(found.api.containers(all=True, filters={"label": f"{labels.RUN}={run}"}))
    finally:
        found.close()


def test_an_image_with_nothing_but_a_shell_serves(run: str) -> None:
    async def scenario() -> None:
        adapter = ContainerSandboxes(run=run, warm=0)
        try:
            sandbox = await adapter.open(Base(f"docker:{docker_engine.shell_alone()}"), LIMITS)
            session = await sandbox.session()
            done = await session.run("echo $HOME; echo one > file; echo $((6 * 7)) >> file; pwd", time_s=TIME_S)
            assert done.stdout == b"/home/agent\n/workspace\n"
            assert archives.unpack((await sandbox.changes()).written) == {"file": b"one\n42\n"}
        finally:
            await adapter.close()

    asyncio.run(scenario())
    until(lambda: not containers_of(run), seconds=60, every=0.2)


def test_a_container_has_no_network_no_privilege_and_limits(run: str) -> None:
    async def scenario() -> None:
        adapter = ContainerSandboxes(image=docker_engine.image(), run=run, warm=0)
        try:
            sandbox = await adapter.open(Base(), LIMITS)
            session = await sandbox.session()
            status = (await session.run("cat /proc/self/status; ls /sys/class/net", time_s=TIME_S)).stdout.decode()
            user = (await session.run("id -un; touch /etc/x /x; ls -A /.etude-layer", time_s=TIME_S)).stdout
            assert "NoNewPrivs:\t1" in status
            assert "CapEff:\t0000000000000000" in status
            assert status.endswith("\nlo\n")
            [found] = containers_of(run)
            about = adapter.engine.api.inspect_container(found["Id"])
            users = adapter.engine.users
        finally:
            await adapter.close()
        host, config = about["HostConfig"], about["Config"]
        assert host["NetworkMode"] == "none"
        assert (host["CapDrop"], host["CapAdd"], host["Privileged"]) == (["ALL"], None, False)
        assert "no-new-privileges" in host["SecurityOpt"]
        assert host["Memory"] == host["MemorySwap"] == 128 << 20
        assert LIMITS.processes <= host["PidsLimit"] <= LIMITS.processes + 16
        assert user == b"agent\n"
        assert about["HostConfig"]["ReadonlyRootfs"]
        uid = int(config["User"].split(":")[0])
        assert about["Name"] == f"/etude-sandbox-{uid}"
        assert uid in users
        assert labels.Owner.parse(config["Labels"][labels.OWNER]) == labels.this_process()
        binds = [mount for mount in about["Mounts"] if mount["Type"] == "bind"]
        assert binds == []
        assert {mount["Destination"] for mount in about["Mounts"] if mount["RW"]} == {VOLUME}
        assert bundle.HOME in {mount["Destination"] for mount in about["Mounts"]}

    asyncio.run(scenario())


def test_the_disk_limit_holds_after_the_sandbox_was_full_of_processes(run: str) -> None:
    """The loop measures every few seconds, and has no process for it meanwhile."""
    crowd = f"for n in $(seq {LIMITS.processes * 2}); do sleep 600 & done 2>/dev/null; sleep 600"

    async def scenario() -> None:
        adapter = ContainerSandboxes(image=docker_engine.image(), run=run, warm=0)
        try:
            sandbox = await adapter.open(Base(), LIMITS)
            session = await sandbox.session()
            await session.run(crowd, time_s=8.0)
            done = await session.run(f"head -c {LIMITS.disk_mb * 2}M /dev/zero > filler && echo all", time_s=TIME_S)
            assert (done.cause, done.stdout) == (Cause.disk_limit, b"")
            assert (await session.run("rm filler; echo well", time_s=TIME_S)).stdout == b"well\n"
        finally:
            await adapter.close()

    asyncio.run(scenario())


def test_nothing_is_left_of_a_killed_worker(run: str) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, docker_engine.image(), run],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"open\n"
        assert containers_of(run)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    until(lambda: not containers_of(run), seconds=60, every=0.2)


def test_a_container_that_is_removed_from_outside_is_infrastructure(run: str) -> None:
    async def scenario() -> None:
        adapter = ContainerSandboxes(image=docker_engine.image(), run=run, warm=0)
        try:
            sandbox = await adapter.open(Base(), LIMITS)
            session = await sandbox.session()
            running = asyncio.create_task(session.run("sleep 600", time_s=TIME_S))
            (container,) = containers_of(run)

            def begun() -> bool:
                processes = adapter.engine.api.top(container["Id"])["Processes"]
                return any("sleep 600" in " ".join(fields) for fields in processes)

            await eventually(lambda: asyncio.to_thread(begun), "the command to begin")
            adapter.engine.api.remove_container(container["Id"], force=True)
            with pytest.raises(SandboxUnavailable, match="ended"):
                await running
            with pytest.raises(SandboxUnavailable):
                await sandbox.session()
        finally:
            await adapter.close()

    asyncio.run(scenario())


def test_an_image_that_does_not_exist_and_one_for_another_machine_are_refused(run: str) -> None:
    async def scenario() -> None:
        adapter = ContainerSandboxes(run=run, warm=0)
        try:
            with pytest.raises(ValueError, match=r"'etude-test/missing', which the engine does not have; docker pull"):
                await adapter.open(Base("docker:etude-test/missing"), LIMITS)
            with pytest.raises(ValueError, match="found machine type linux/s390x"):
                await adapter.open(Base(f"docker:{docker_engine.foreign()}"), LIMITS)
            with pytest.raises(ValueError, match="allowed: docker:<reference>"):
                await adapter.open(Base("base:0123"), LIMITS)
        finally:
            await adapter.close()

    asyncio.run(scenario())
    assert containers_of(run) == []


def volumes_of_sandboxes() -> set[str]:
    """Return the engine's volumes that belong to one container."""
    found = engine.connect()
    try:
        listed = found.api.volumes(filters={"label": f"{labels.KIND}=files"})["Volumes"] or []
        return {one["Name"] for one in listed if labels.DIGEST not in (one["Labels"] or {})}
    finally:
        found.close()


def test_a_container_of_the_pool_serves_the_next_sandbox_and_none_is_left(run: str) -> None:
    before = volumes_of_sandboxes()

    async def scenario() -> None:
        adapter = ContainerSandboxes(image=docker_engine.image(), run=run)
        try:
            first = await adapter.open(Base(), LIMITS)
            await asyncio.gather(*adapter._pool._filling)
            [waiting] = [one for ready in adapter._pool._ready.values() for one in ready]
            second = await adapter.open(Base(), LIMITS)
            assert second.running is waiting
            for sandbox in (first, second):
                done = await (await sandbox.session()).run("echo mine > file; cat *", time_s=TIME_S)
                assert done.stdout == b"mine\n"
        finally:
            await adapter.close()

    asyncio.run(scenario())
    until(lambda: not containers_of(run), seconds=60, every=0.2)
    until(lambda: volumes_of_sandboxes() <= before, seconds=60, every=0.2)


def test_a_snapshot_keeps_owners_modes_links_and_deletions_of_every_place(run: str, tmp_path: Path) -> None:
    """Also in another sandbox."""
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_text("of the base")
    (tmp_path / "gone").write_text("of the base")
    (tmp_path / "kept").write_text("of the base")
    change = """
        rm gone; rm -r folder; mkdir folder; echo new > folder/new; chmod 700 folder
        echo one > a; chmod 640 a; ln a twin; ln -s nowhere link; mkfifo pipe; chmod 000 twin
        dd if=/dev/zero of=sparse bs=1 count=1 seek=1000000 2>/dev/null
        echo h > ~/file; echo t > /tmp/file; echo v > /var/tmp/file; touch -d '2001-02-03 04:05:06' a
    """
    spoil = "chmod 777 *; rm -rf a twin folder pipe link ~/file /tmp/file; echo x | tee gone kept later /dev/shm/x"
    look = """
        find . ~ /tmp /var/tmp -printf '%p %y %m %u %n %s %l\n' | sort; stat -c %Y a
        cat kept folder/* ~/file /tmp/file /var/tmp/file
        chmod 600 a; cat a twin; [ a -ef twin ] && echo same; ls -A /dev/shm
    """

    async def scenario() -> None:
        adapter = ContainerSandboxes(image=docker_engine.image(), run=run, warm=0)
        try:
            first = await adapter.open(Base(tree=tmp_path), LIMITS)
            session = await first.session()
            await session.run(change, time_s=TIME_S)
            kept = await first.snapshot()
            wanted = (await session.run(look, time_s=TIME_S)).stdout
            await session.run(spoil, time_s=TIME_S)
            await first.restore(kept)
            assert (await session.run(look, time_s=TIME_S)).stdout == wanted
            for _ in range(3):
                await first.restore(kept)
            assert (await session.run(look, time_s=TIME_S)).stdout == wanted
            mounts = "grep -c ' - overlay ' /proc/self/mountinfo"

            async def old_ones_are_gone() -> bool:
                return int((await (await first.session()).run(mounts, time_s=TIME_S)).stdout) == 5

            await eventually(old_ones_are_gone, "five mounts", every=0.1)
            changes = await first.changes()
            assert {"gone", "folder/inner/file"} <= set(changes.deleted)
            second = await adapter.open(Base(tree=tmp_path), LIMITS, snapshot=kept)
            assert (await (await second.session()).run(look, time_s=TIME_S)).stdout == wanted
        finally:
            await adapter.close()

    asyncio.run(scenario())
    until(lambda: not containers_of(run), seconds=60, every=0.2)


def test_a_user_is_given_to_one_live_container_alone(run: str) -> None:
    async def scenario() -> None:
        adapter = ContainerSandboxes(image=docker_engine.image(), run=run, warm=0)
        try:
            first = await adapter.open(Base(), LIMITS)
            [found] = containers_of(run)
            only = int(found["Names"][0].rpartition("-")[2])
            adapter._engine = replace(adapter.engine, users=range(only, only + 1))
            with pytest.raises(SandboxUnavailable, match="users in a row are in use; close sandboxes"):
                await adapter.open(Base(), LIMITS)
            await first.close()
            await adapter.open(Base(), LIMITS)
        finally:
            await adapter.close()

    asyncio.run(scenario())


def test_the_reaper_removes_what_has_expired_and_nothing_else(run: str) -> None:
    found = engine.connect()
    try:
        image = docker_engine.image()
        marks = {**labels.labels("sandbox", seconds=300, run=run)}
        dead = {**marks, labels.OWNER: str(labels.Owner(labels.this_process().machine, os.getpid(), "1"))}
        late = {**marks, labels.DEADLINE: "1"}
        made = [found.api.create_container(image, ["/bin/true"], labels=one)["Id"] for one in (marks, dead, late)]
        assert reaper.reap(found) >= 2
        assert [one["Id"] for one in containers_of(run)] == made[:1]
    finally:
        for one in containers_of(run):
            found.api.remove_container(one["Id"])
        found.close()
