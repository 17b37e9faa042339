"""The servers that tests run against are themselves kept to their promises; Redis stands for all, the quickest of them."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from redis import Redis

from infra.servers import Unavailable, fleet, ports, programs, state
from infra.servers.place import Launch
from tests.servers import need


@pytest.fixture
def folder(tmp_path: Path):
    need("ETUDE_JOBS")  # its program is here
    folder = tmp_path / "servers"
    yield folder
    fleet.down(folder)


def client(folder: Path) -> Redis:
    return Redis.from_url(state.settings(folder)["ETUDE_JOBS"])


def test_up_again_leaves_a_running_server_alone(folder: Path) -> None:
    fleet.up(["redis"], folder)
    first = state.read(folder)
    fleet.up(["redis"], folder)
    assert state.read(folder) == first


def test_a_server_that_was_killed_comes_back_at_its_address_with_its_data(folder: Path) -> None:
    fleet.up(["redis"], folder)
    client(folder).set("kept", "yes")
    before = state.read(folder)["redis"]
    os.kill(before.pid, signal.SIGKILL)
    os.waitpid(before.pid, 0)
    assert state.settings(folder) == {}
    fleet.up(["redis"], folder)
    after = state.read(folder)["redis"]
    assert (after.ports, after.secret) == (before.ports, before.secret)
    assert after.pid != before.pid
    assert client(folder).get("kept") == b"yes"


def test_a_server_whose_port_is_taken_while_it_starts_is_started_once_more_at_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask, taken = fleet.free_ports, []
    with socket.socket() as other:

        def then_taken(count: int) -> tuple[int, ...]:
            found = ask(count)
            if not taken:
                other.bind(("127.0.0.1", found[0]))
                other.listen()
                taken.extend(found)
            return found

        monkeypatch.setattr(fleet, "free_ports", then_taken)
        fleet.up(["redis"], folder)
        assert client(folder).ping()
    assert state.read(folder)["redis"].ports != tuple(taken)
    assert "redis: ended while starting." in (said := capsys.readouterr().out)
    assert "redis: once more" in said


def test_a_server_that_ends_twice_while_it_starts_is_named_with_its_own_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fleet.Redis, "launch", lambda *_: Launch(["sh", "-c", "echo no luck >&2; exit 3"], {}, signal.SIGTERM)
    )
    with pytest.raises(Unavailable, match=r"(?s)redis: ended while starting\. Its log says:\nno luck\nno luck"):
        fleet.up(["redis"], folder)


def test_down_ends_the_process_and_leaves_nothing(folder: Path) -> None:
    fleet.up(["redis"], folder)
    process = state.read(folder)["redis"].process
    assert process
    fleet.down(folder)
    assert not process.is_running() or process.status() == "zombie"
    assert state.read(folder) == {}
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_process_that_only_has_the_id_of_a_server_is_neither_taken_for_it_nor_ended(folder: Path) -> None:
    fleet.up(["redis"], folder)
    rows = state.read(folder)
    fleet.down(folder, keep=True)
    rows["redis"].pid = os.getpid()
    state.write(rows, folder)
    assert rows["redis"].process is None
    fleet.down(folder)  # would end this very process


def test_the_addresses_are_for_this_users_eyes_only(folder: Path) -> None:
    fleet.up(["redis"], folder)
    assert (folder / "state.json").stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0


def test_a_program_that_cannot_be_fetched_is_tried_three_times_and_named_with_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []

    def fail() -> None:
        tries.append(1)
        raise Unavailable("the mirror does not answer")

    monkeypatch.setattr(programs, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(programs, "WANTED", {"Chromium": fail})
    with pytest.raises(
        Unavailable, match=r"make programs: cannot get Chromium in 3 tries\. the mirror does not answer"
    ):
        programs.fetch()
    assert len(tries) == 3


def test_ports_are_none_that_the_kernel_hands_out_and_none_is_given_twice() -> None:
    found = ports.free_ports(50)
    assert len(set(found)) == 50
    assert not set(found) & set(ports.handed_out())
