"""Services found by names of the network: real servers on addresses of this machine, and a name that leads to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from pydantic import ValidationError

from etude.status import collect, told
from services.console.flow import Snapshot, flow
from services.console.neighbours import survey
from services.trainer.cli import _engines as engines_of
from shared.neighbours import Endpoint, addresses, announced, find, named
from shared.settings import ServiceSettings, load
from shared.telemetry import Health

ENGINES = "engines.example"
PLACES = ("127.0.0.2", "127.0.0.3")
MUTE = "127.0.0.4"  # nobody listens there


def of_the_name(host: str) -> list[str]:
    return {ENGINES: [*PLACES, MUTE], "trainer.example": [PLACES[0]]}.get(host, [])


@contextlib.asynccontextmanager
async def engines(state: Path) -> AsyncIterator[int]:
    """One port on two addresses: each replica with a state directory of its own, as in a cluster."""
    with socket.socket() as probe:
        probe.bind((PLACES[0], 0))
        port = probe.getsockname()[1]
    async with contextlib.AsyncExitStack() as stack:
        for i, place in enumerate(PLACES):
            own = ServiceSettings(state=state / str(i), name=f"engine-{i}", host=place, port=port)
            health = await stack.enter_async_context(Health("inference", own))
            if i:
                health.wait_on("a run")
                health.tell("r-1", "admitting 0 groups")
        yield port


def test_the_console_finds_every_replica_that_a_name_leads_to_and_shows_the_one_that_does_not_answer(tmp_path):
    async def scenario() -> None:
        async with engines(tmp_path) as port, aiohttp.ClientSession() as http:
            settings = ServiceSettings(state=tmp_path / "console", neighbours={"inference": [f"{ENGINES}:{port}"]})
            found = await survey(http, settings, of_the_name)
            mute = f"inference at {MUTE}:{port}"
            assert [(n.name, n.service, n.state) for n in found] == [
                ("engine-0", "inference", "ready"),
                ("engine-1", "inference", "waiting"),
                (mute, "inference", "silent"),
            ]
            assert [n.pid > 0 for n in found] == [True, True, False]
            assert found[1].waits[0].what == "a run"
            node = next(n for n in flow(Snapshot(1.0, tuple(found)), None).nodes if n.service == "inference")
            assert (node.replicas, node.ready) == (3, 1)

    asyncio.run(scenario())


def test_status_lists_them_too_and_shows_what_they_reckon_with(tmp_path, monkeypatch):
    async def scenario() -> None:
        async with engines(tmp_path) as port:
            monkeypatch.setenv("ETUDE_NEIGHBOURS", json.dumps({"inference": [f"{ENGINES}:{port}"]}))
            rows = await asyncio.to_thread(collect, tmp_path / "console", of_the_name)
            assert [(row["name"], row["state"]) for row in rows] == [
                ("engine-0", "ready"),
                ("engine-1", "waiting"),
                (f"inference at {MUTE}:{port}", "silent"),
            ]
            assert rows[1]["waits"][0]["waits_on"] == "a run"
            assert [row["tells"] for row in rows] == [{}, {"r-1": "admitting 0 groups"}, {}]
            assert told(rows) == ["engine-1, r-1: admitting 0 groups"]

    asyncio.run(scenario())


def test_engines_that_are_known_by_name_are_verified_too(monkeypatch):
    monkeypatch.setenv("ETUDE_NEIGHBOURS", json.dumps({"inference": ["localhost:8700"], "trainer": ["localhost:8701"]}))
    urls = engines_of(load(ServiceSettings, []).model_copy(update={"state": Path("nowhere")}))
    assert "http://127.0.0.1:8700" in urls
    assert not [url for url in urls if url.endswith(":8701")]


def test_who_announced_itself_is_not_found_again_by_its_name(tmp_path):
    """The file has its name and its process; two names may also lead to one address."""

    async def scenario() -> None:
        async with engines(tmp_path) as port, aiohttp.ClientSession() as http:
            settings = ServiceSettings(
                state=tmp_path / "0",
                neighbours={"inference": [f"{ENGINES}:{port}"], "other": [f"trainer.example:{port}"]},
            )
            assert [e.name for e in find(settings, of_the_name)] == ["engine-0", "", ""]
            assert [n.name for n in await survey(http, settings, of_the_name)][:2] == ["engine-0", "engine-1"]

    asyncio.run(scenario())


def test_a_name_that_nobody_has_is_nobody_and_one_that_cannot_be_looked_up_is_shown():
    def out_of_order(host: str) -> list[str]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    neighbours = {"trainer": ["none.example:8700"]}
    assert list(named(neighbours, of_the_name)) == []
    assert list(named(neighbours, out_of_order)) == [Endpoint("trainer", "http://none.example:8700")]
    # What can be no name is looked up for real: an empty label, and one that is too long.
    for host in ("a..b", "x" * 64 + ".example"):
        assert list(named({"trainer": [f"{host}:8700"]})) in ([], [Endpoint("trainer", f"http://{host}:8700")])


def test_addresses_of_ipv6_stand_in_brackets():
    assert [e.url for e in named({"trainer": ["x:1"]}, lambda _: ["fd00::7"])] == ["http://[fd00::7]:1"]


def test_a_name_is_looked_up_in_the_network_and_has_each_address_once():
    assert "127.0.0.1" in addresses("localhost")
    assert addresses("127.0.0.9") == ["127.0.0.9"]


def test_files_that_are_none_of_ours_are_passed_over(tmp_path):
    (tmp_path / "run").mkdir()
    good = {"service": "trainer", "name": "t", "pid": 7, "url": "http://127.0.0.1:1"}
    for name, text in {
        "broken": "{",
        "list": "[]",
        "short": '{"service": "trainer"}',
        "odd": json.dumps({**good, "url": "ftp://x"}),
        "t": json.dumps(good),
    }.items():
        (tmp_path / "run" / f"{name}.json").write_text(text)
    assert list(announced(tmp_path)) == [Endpoint("trainer", "http://127.0.0.1:1", "t", 7)]


@pytest.mark.parametrize("place", ["trainer", "trainer:", "http://trainer:8700", "a b:1"])
def test_a_place_that_is_no_host_and_port_is_refused(place):
    with pytest.raises(ValidationError, match="neighbours"):
        ServiceSettings(neighbours={"trainer": [place]})
