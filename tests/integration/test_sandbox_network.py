"""The network of every adapter that has one, through its own loop and the real proxy: what passes, what is refused, what is seen.

Attacks on the proxy itself are in test_egress.py: it is the same one for every adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.patience import patient

pytest.importorskip("cryptography", reason="the network of sandboxes is an extra: etude[egress]")
pytest.importorskip("h11", reason="the network of sandboxes is an extra: etude[egress]")

from shared.sandbox.bubblewrap_sandboxes import BubblewrapSandboxes
from shared.sandbox.contract import Base, Capability, Limits, Network, Sandbox, Sandboxes, Session
from tests import cluster, docker_engine
from tests.contract.sandboxes import NO_BWRAP
from tests.integration.egress_world import SECRET, EgressProxy, World, forbidden, traces, world
from tests.integration.sandbox_attacks import marked, user_of

LIMITS = Limits(memory_mb=128, disk_mb=64, processes=64, seconds=300.0)
TIME_S = 60.0
TOKEN = SECRET.split(" ")[1].encode()
FILES = ("tmp", "dev/shm", "workspace", "home/agent", "run/etude-network")
ADAPTERS: dict[str, Callable[[Path, Any], Sandboxes]] = {
    "bubblewrap": lambda state, proxy: BubblewrapSandboxes(state, warm=0, proxy=proxy),
    "docker": lambda state, proxy: docker_engine.sandboxes(proxy=proxy),
    "kubernetes": lambda state, proxy: cluster.sandboxes(proxy=proxy),
}
FETCH = "python3 -c 'import urllib.request as u; print(u.urlopen(\"{}\", timeout=30).read().decode())' 2>&1 | tail -1"
HOLD = """
import os, sys, time, urllib.request
kept = [urllib.request.urlopen(sys.argv[1]) for _ in range(2)]
text = [(one.read(), str(one.headers)) for one in kept]
open("/tmp/answers", "w").write(repr(text))
print("holding", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=[pytest.param(name, id=name) for name in ADAPTERS])
def within(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Runs a scenario with the servers, and a sandbox that may reach good.test and index.test, with the latter's credential."""
    if request.param == "bubblewrap" and NO_BWRAP:
        pytest.skip(NO_BWRAP)
    tmp_path.chmod(0o755)

    def run(scenario: Callable[[World, Sandbox, Session], Awaitable[None]], base: Base = Base()) -> None:
        async def opened() -> None:
            async with asyncio.timeout(patient(280)), world() as made:

                def proxy(network: Network, name: str) -> EgressProxy:
                    return EgressProxy(network, name=name, resolve=made.resolve, forbidden=forbidden, trust=made.trust)

                adapter = ADAPTERS[request.param](tmp_path / "state", proxy)
                assert Capability.network in adapter.capabilities
                allow = (f"good.test:{made.http}", f"index.test:{made.http}")
                try:
                    sandbox = await adapter.open(base, LIMITS, Network(allow, made.network.credentials))
                    await scenario(made, sandbox, await sandbox.session())
                finally:
                    await adapter.close()

        asyncio.run(opened())

    return run


async def said(session: Session, script: str) -> str:
    return (await session.run(script, time_s=TIME_S)).stdout.decode().strip()


def test_an_allowed_host_works_and_all_else_is_refused_and_recorded(within: Callable[..., None]) -> None:
    async def scenario(made: World, sandbox: Sandbox, session: Session) -> None:
        good, other, index = (f"http://{name}.test:{made.http}/" for name in ("good", "other", "index"))
        assert await said(session, FETCH.format(good)) == "hello 0"
        assert "403" in await said(session, FETCH.format(other))
        assert "403" in await said(session, FETCH.format(f"http://127.0.0.3:{made.http}/"))
        assert "tiny" in await said(session, FETCH.format(f"{index}simple/tiny/"))
        assert int(await said(session, "grep -c 'BEGIN CERT' $SSL_CERT_FILE")) >= 1
        assert "ok" in await said(session, "echo x > $SSL_CERT_FILE || rm $SSL_CERT_FILE || echo ok")
        direct = f"python3 -c 'import socket; socket.create_connection((\"127.0.0.2\", {made.http}), 5)' || echo none"
        assert await said(session, direct) == "none"
        decided = [(one.host, one.allowed) for one in sandbox.decisions]
        refused = f"127.0.0.3:{made.http}"
        assert decided == [("good.test", True), ("other.test", False), (refused, False), ("index.test", True)]

    within(scenario)


def test_code_inside_cannot_end_the_way_and_a_restored_sandbox_has_it(within: Callable[..., None]) -> None:
    async def scenario(made: World, sandbox: Sandbox, session: Session) -> None:
        fetch = FETCH.format(f"http://good.test:{made.http}/")
        kept = await sandbox.snapshot()
        await session.run("kill -9 -1", time_s=TIME_S)
        taken = "python3 -c 'import socket; socket.create_server((\"127.0.0.1\", 3128))' || echo taken"
        assert await said(session, taken) == "taken"
        assert await said(session, fetch) == "hello 0"
        await sandbox.restore(kept)
        session = await sandbox.session()
        assert await said(session, fetch) == "hello 0"
        large = f"http://good.test:{made.http}/large"
        count = f"python3 -c 'import urllib.request as u; print(len(u.urlopen(\"{large}\", timeout=60).read()))'"
        together = f"for n in 1 2 3 4; do {count} & done; wait"
        assert (await said(session, together)).split() == ["1000000"] * 4

    within(scenario)


def outside(pid: int) -> bool:
    """Tell whether a process sees this machine's files, as the bubblewrap does that stands for a pod's runtime."""
    with contextlib.suppress(OSError):
        return os.path.samefile(f"/proc/{pid}/root", "/")
    return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads the memory of a sandbox's processes")
@pytest.mark.parametrize("given", [False, True], ids=["by the proxy", "to the sandbox"])
def test_a_scan_finds_a_credential_only_where_the_sandbox_was_given_it(
    within: Callable[..., None], given: bool
) -> None:
    mark = str(10**9 + int.from_bytes(os.urandom(3), "big"))

    async def scenario(made: World, sandbox: Sandbox, session: Session) -> None:
        await sandbox.spawn(["/bin/sleep", mark])
        holder = await sandbox.spawn(["python3", "-c", HOLD, f"http://index.test:{made.http}/echo"])
        assert await holder.receive(100) == b"holding\n"
        if given:
            await said(session, "echo $TOKEN > /tmp/token")
        while not (found := marked(mark)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        user = user_of(min(found))
        # Also those that hide themselves. `process_iter` leaves out what ends meanwhile.
        inside = [
            one for one in psutil.process_iter(["uids"]) if user in (one.info["uids"] or ()) and not outside(one.pid)
        ]
        assert len(inside) >= 3, "the loop, the sleeper and the holder"
        traced: set[str] = set()
        for one in inside:
            try:
                traced |= traces(one, TOKEN, FILES)
            except (OSError, psutil.Error):  # it has ended, or has no memory of its own any more
                continue
        assert traced >= {"environ", "memory", "files"} if given else traced == set()
        assert sum(TOKEN in head for head in made.heads) == 2

    within(scenario, Base(environment={"TOKEN": SECRET}) if given else Base())
