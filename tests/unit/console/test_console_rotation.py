"""Replicas that were killed are not shown as serving, and those that live are."""

from __future__ import annotations

import asyncio
import json
import re

from services.console.board import Board
from services.console.neighbours import Neighbour
from services.console.rotation import standings
from shared.contracts import messages as m
from shared.contracts import topics as t
from tests.unit.console.conftest import RUN
from tests.unit.console.serving import console


def applied(name: str, serial: int, *, url: str = "", pool: str = "rollout", ok: bool = True) -> m.PolicyApplied:
    return m.PolicyApplied(run=RUN, replica=name, url=url or f"http://{name}", pool=pool, serial=serial, ok=ok)  # type: ignore[arg-type]


def board_of(*said: tuple[float, m.PolicyApplied]) -> Board:
    board = Board(10)
    for at, message in said:
        board.apply(message, at)
    return board


def beside(name: str, state: str = "ready") -> Neighbour:
    return Neighbour(name, "inference", "http://x", 1, state)


def gone(board: Board, *neighbours: Neighbour, now: float = 1000.0) -> set[str]:
    return {s.replica.replica for s in standings(board, neighbours, now) if s.gone}


def test_a_killed_replica_is_gone_when_it_does_not_answer_or_is_no_more_beside_the_others():
    board = board_of((1000.0, applied("old", 3)), (1000.0, applied("new", 3)), (1000.0, applied("mute", 3)))
    assert gone(board, beside("new"), beside("mute", "silent")) == {"old", "mute"}
    assert gone(board, beside("new", "waiting"), beside("mute"), beside("old")) == set()
    assert gone(board) == set()  # where the console sees no replica it knows nothing


def test_one_that_is_known_by_its_address_alone_and_does_not_answer_is_gone_for_that_reason():
    board = board_of((1.0, applied("a", 1)), (1.0, applied("b", 1)))
    mute = Neighbour("inference at b:8700", "inference", board.replicas["b"].url, 0, "silent")
    (found,) = (s for s in standings(board, [beside("a"), mute], 1000.0) if s.gone)
    assert (found.replica.replica, found.gone) == ("b", "it does not answer")


def test_a_replica_whose_address_another_has_taken_is_gone():
    board = board_of((1.0, applied("a", 3, url="http://x")), (2.0, applied("b", 3, url="http://x")))
    assert gone(board) == {"a"}
    board.apply(applied("a", 4, url="http://x"), 3.0)
    assert gone(board) == {"b"}


def test_a_replica_that_others_have_overtaken_is_gone_after_a_while_and_a_pause_of_hours_is_nothing():
    hours = 5 * 3600.0
    said = [(1.0, applied("a", 1)), (1.0, applied("b", 1)), (1.0, applied("pinned", 1, pool="evaluation"))]
    board = board_of(*said, (hours, applied("b", 2)))
    assert gone(board, now=hours + 60) == set()  # it may be taking the version
    assert gone(board, now=hours + m.GONE_S + 1) == {"a"}
    board.apply(applied("a", 2), hours + 700)
    assert gone(board, now=hours + 2 * m.GONE_S) == set()
    restarted = board_of(*said, (hours, applied("b", 1)))  # the same version once more
    assert gone(restarted, now=2 * hours) == set()


def test_one_that_said_that_it_left_is_out_not_gone():
    board = board_of((1.0, applied("a", 1, ok=False)), (1.0, applied("b", 1)))
    assert gone(board, beside("b")) == set()


def test_the_pages_say_so(world, tmp_path):
    async def scenario():
        async with console(world, tmp_path) as there:
            await there.bus.publish(t.POLICIES_APPLIED, "killed", applied("killed", 3))
            file = {"service": "inference", "name": "engine-0", "pid": 1, "url": there.url}
            (tmp_path / "run" / "engine-0.json").write_text(json.dumps(file))
            async with asyncio.timeout(10):
                while "killed" not in there.board.replicas:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for path in ("/", f"/runs/{RUN}"):
                _, _, page = await there.get(path)
                rows = re.findall(r"<tr>.*?</tr>", page.html, re.S)
                assert [">gone<" in row for row in rows if "<td>killed</td>" in row] == [True], path
                assert [">in rotation<" in row for row in rows if "<td>engine-0</td><td>rollout" in row] == [True], path

    asyncio.run(scenario())
