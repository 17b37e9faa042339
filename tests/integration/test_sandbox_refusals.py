"""Machines and inputs that cannot be served: a clear error with the way out, and nothing left behind.

A machine that forbids something is a bubblewrap around this test's process: an ordinary user without a capability, as the shipped
containers have it, with a part of the system taken away.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.sandbox import channel
from shared.sandbox.channel import PUT_CAPS
from shared.sandbox.contract import Base, Caps, Limits, Sandbox
from tests.contract.sandboxes import AGENTS, OfAgents, every
from tests.integration.under_profile import library
from tests.patience import patient

PROJECT = Path(__file__).parents[2]
PROFILE = PROJECT / "infra" / "docker" / "seccomp-worker.json"
MASKED = next((path for path in ("/proc/keys", "/proc/timer_list", "/proc/interrupts") if os.path.exists(path)), "")
ORDINARY = ["bwrap", "--unshare-user", "--uid", "10001", "--gid", "10001", "--cap-drop", "ALL", "--dev-bind", "/", "/"]

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "state"
    place.mkdir(mode=0o700)
    yield place
    assert list(place.iterdir()) == []


def once(
    state: Path, *machine: str, outside: Sequence[str] = (), environment: dict[str, str] | None = None, **options: Any
) -> dict[str, Any]:
    """Open a sandbox on such a machine, or by a program `outside`. Return what came of it."""
    command = [sys.executable, "-m", "tests.integration.sandbox_once", str(state), json.dumps(options)]
    outside = [*ORDINARY, *machine, "--"] if machine else outside
    done = subprocess.run(
        [*outside, *command],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=patient(120),
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said.pop("left") == []
    return said


def test_without_bubblewrap(state: Path) -> None:
    refused = once(state, environment={"PATH": "/nowhere"})["refused"]
    assert "bwrap is not on the PATH; install bubblewrap" in refused


def test_without_user_namespaces(state: Path) -> None:
    refused = once(state, "--disable-userns")["refused"]
    assert "user.max_user_namespaces" in refused
    assert "docs/sandboxes.md" in refused


@pytest.mark.skipif(not MASKED, reason="this machine's /proc has nothing to mask")
def test_below_a_masked_proc(state: Path) -> None:
    refused = once(state, "--ro-bind", "/dev/null", MASKED)["refused"]
    assert "systempaths=unconfined" in refused
    assert "procMount: Unmasked" in refused


def test_without_cgroups_the_loop_watches_the_memory(state: Path) -> None:
    assert once(state, "--tmpfs", "/sys/fs/cgroup") == {"memory_by": "watchdog", "output": "well\n"}


def test_under_the_profile_of_the_shipped_containers_a_sandbox_works(state: Path) -> None:
    try:
        library()
    except OSError:
        pytest.skip("no libseccomp.so.2 here")
    assert once(state, "--unshare-ipc", profile=str(PROFILE)).get("output") == "well\n"


def test_under_a_profile_that_forbids_namespaces(state: Path) -> None:
    try:
        library()
    except OSError:
        pytest.skip("no libseccomp.so.2 here")
    refused = once(state, "--unshare-ipc", profile=str(PROFILE), without=["clone", "unshare"])["refused"]
    assert "seccomp-worker.json" in refused


def test_on_a_full_disk(state: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "big").write_bytes(bytes(1 << 20))
    refused = once(state, "--size", str(1 << 18), "--tmpfs", str(state), tree=str(tree))["refused"]
    assert "No space left on device" in refused
    assert "free some, or name a folder on another disk" in refused


def test_on_a_disk_that_executes_nothing(state: Path) -> None:
    """As Docker mounts a container's tmpfs, unless it is asked for another."""
    mounted = 'mount -t tmpfs -o noexec none "$0" && exec "$@"'
    refused = once(state, outside=["unshare", "-Urm", "sh", "-c", mounted, str(state)])["refused"]
    assert "noexec" in refused
    assert "docker: --tmpfs /tmp:exec" in refused


def test_a_base_of_another_machine_type(state: Path, tmp_path: Path) -> None:
    """The cache of bases refuses one by its manifest (test_base_cache.py); this is a folder that lies."""
    image = tmp_path / "image"
    for name in ("bin", "proc", "dev", "tmp", "workspace"):
        (image / name).mkdir(parents=True, exist_ok=True)
    other = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\x16\x00" + bytes(100)  # of s390x
    (image / "bin/sh").write_bytes(other)
    (image / "bin/sh").chmod(0o755)
    for path in (tmp_path, image, *image.rglob("*")):
        path.chmod(0o755)
    refused = once(state, image=str(image))["refused"]
    assert "Exec format error" in refused
    assert "another machine type" in refused


# Tar bombs


def _sparse() -> bytes:
    """Return an archive of 1 KiB whose file says that it is a terabyte."""
    head = tarfile.TarInfo("bomb")
    head.size = 1 << 40
    return head.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def _gnu_sparse() -> bytes:
    head = tarfile.TarInfo("bomb")
    head.type = tarfile.GNUTYPE_SPARSE
    raw = bytearray(head.tobuf(tarfile.GNU_FORMAT))
    raw[386:398], raw[398:410] = b"00000000000\0", b"00000000000\0"
    raw[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")  # its size when it is unpacked
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw[:512]):06o}\0 ".encode()
    return bytes(raw) + bytes(1024)


def _many(count: int = 2_001) -> bytes:
    """Return so many empty files."""
    head = bytearray(tarfile.TarInfo("0" * 8).tobuf(tarfile.USTAR_FORMAT))
    out, start = io.BytesIO(), sum(head[:512])
    zeros = sum(b"00000000")
    for number in range(count):
        name = b"%08d" % number
        head[:8] = name
        head[148:156] = b"%06o\0 " % (start - sum(head[148:156]) + 8 * 32 - zeros + sum(name))
        out.write(head)
        start, zeros = sum(head[:512]), sum(name)
    return out.getvalue() + bytes(1024)


def _deep() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("a/" * 20_000 + "file"), io.BytesIO())
    return out.getvalue()


BOMBS = {"a terabyte": _sparse, "a sparse terabyte": _gnu_sparse, "many files": _many, "deep folders": _deep}


@pytest.mark.parametrize("adapter", every(AGENTS))
def test_a_tar_bomb_is_refused_and_leaves_nothing(
    adapter: OfAgents, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        channel, "PUT_CAPS", Caps(size=PUT_CAPS.size, files=2_000)
    )  # the real number takes half a minute

    async def scenario(sandbox: Sandbox) -> None:
        session = await sandbox.session()
        for name, bomb in BOMBS.items():
            archive = bomb()
            with pytest.raises(ValueError, match="found"):
                await sandbox.put(archive)
            left = (await session.run("find .", time_s=60.0)).stdout.split()
            assert left == [b"."], name
        assert (await session.run("echo well", time_s=60.0)).stdout == b"well\n"

    async def run() -> None:
        sandboxes = adapter.make(state)
        try:
            await scenario(await sandboxes.open(Base(), Limits(disk_mb=64)))
        finally:
            await sandboxes.close()

    asyncio.run(run())
